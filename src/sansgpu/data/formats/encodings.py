"""Recognizes the encoding of text files, and reads all of them as UTF-8."""

from __future__ import annotations

import codecs
import io
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from sansgpu.data.formats.opening import BLOCK, archive_of, open_bytes

_T = TypeVar("_T")
AUTO = "auto"
UTF8 = "utf-8"
MAX_ASCII = 256 << 20  # bytes at the start of a file in which to look for the first ones that are not ASCII
MIN_WIDE_SHARE = 0.4  # share of zero bytes at even or odd places from which a file without a mark is UTF-16
MIN_WIDE_CHARACTERS = 4
MIN_SCORE = 0.55  # mean score of a text's letters from which an encoding is recognized
UNDECODED, MAX_UNDECODED = "\ufffd", 0.1  # share of the characters beyond ASCII that a damaged file may lack
SCORED_BYTES = 1 << 15
LATIN_BONUS, BONUS_LETTERS = 0.1, 20  # the first for encodings of Western Europe, halved after this many letters
FEW_LETTERS = 4  # fewer letters beyond ASCII are no evidence of a script other than Latin
_MARKS = {codecs.BOM_UTF8: UTF8, codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
          codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
_SYMBOLS = "“”„‘’–—…€", "°«»¿¡´·§©®™•£½²³ºª‚№،؟؛\xa0"  # those that are frequent, and those that are rarer
# The letters of languages beyond ASCII. A text has letters of one language, and seldom letters of others.
_WESTERN = (
    "äöüß", "àâæçéèêëîïôœùûü", "áéíñóúü", "àáâãçéêíóôõú", "àèéìòù", "åäöæøé", "áðéíóúýþæö", "éëïóö", "äöõüšž",
)  # fmt: skip
_CENTRAL = "ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "čćđšž", "ăâîșțşţ"
_TURKISH, _BALTIC = ("çğıöşüİâîû",), ("ąčęėįšųūž", "āčēģīķļņšūž", "äöõüšž")
# The letters of other scripts that are frequent, and those that are rarer.
_CYRILLIC = "оеаинтсрвлкмдпуяыьОПНВСКія", "бгжзйфхцчшщъэюёєїґАБГДЕЖЗИЛМРТУФХЦЧШЭЮЯІЇЄ"
_GREEK = "αοιεστνηυρπκμλςάέήίόύώ", "βγδζθξφχψωϊϋΐΰΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩΆΈΉΊΌΎΏ"
_HEBREW, _ARABIC = ("אבגדהוזחטיךכלםמןנסעףפץצקרשת", ""), ("اليمونترةبدع", "سفهقكحجشصذخطزضغثظءأإآؤئى")
_THAI = "กขคงจชดตถทนบปพมยรลวสหอะัาิีึืุูเแโใไ่้์็", "ฃฅฆฉซฌญฎฏฐฑฒณธผฝฟภฤศษฬฮฯๆำ๊๋ํๅ"
# The letters of each encoding with one byte for a character: letters of some languages, or frequent and rarer letters.
# The first of several with the same score is recognized. Of the statistics-based detectors, charset-normalizer takes
# "Küche" in cp1252 for cp1250 or Korean: short rows of a table need these prior probabilities.
_LATIN = {
    "cp1252": _WESTERN, "iso8859-15": _WESTERN, "cp1250": _CENTRAL, "iso8859-2": _CENTRAL, "cp1254": _TURKISH,
    "cp1257": _BALTIC, "mac_roman": _WESTERN[:-1], "cp850": _WESTERN[:-1], "cp852": _CENTRAL,
}  # fmt: skip
_OTHER_SCRIPTS = {
    "cp1251": _CYRILLIC, "koi8_r": _CYRILLIC, "koi8_u": _CYRILLIC, "iso8859-5": _CYRILLIC, "cp866": _CYRILLIC,
    "cp1253": _GREEK, "iso8859-7": _GREEK, "cp1255": _HEBREW, "cp1256": _ARABIC, "iso8859-6": _ARABIC,
    "cp874": _THAI,
}  # fmt: skip
_BONUS = ("cp1252", "iso8859-15")
SCORE_DIGITS = 6  # scores that are equal when rounded to so many digits are a tie
OTHER_LANGUAGE = 0.4  # score of a letter of a different language of the same encoding
# Encodings with two bytes for a character: the scripts of their languages, and the first bytes of frequent characters.
_WIDE = {
    "cp932": (("HIRAGANA", "KATAKANA"), range(0x88, 0x98)),
    "euc_jp": (("HIRAGANA", "KATAKANA"), range(0xB0, 0xD0)),
    "cp949": ((), range(0xB0, 0xC9)),
    "big5": ((), range(0xA4, 0xC7)),
    "gb18030": ((), range(0xB0, 0xD8)),
}
# Some of the most frequent characters: nearly all short texts of two bytes a letter are valid in both encodings.
_COMMON = {
    "cp949": "이다는에을의가고하지도를은어나사로리기아자서한시대정인일그해여부보라수",
    "gb18030": "的一是不了我有在人他好",
}
_TWO_HIGH_BYTES = ("cp949", "gb18030")  # both bytes of the frequent characters are beyond ASCII
_FINAL, _NOT_FINAL = "ךםןףץ", "כמנפצ"  # Hebrew letters that are only at the end of words, and never there
_AT_THE_END = "ìù"  # in Italian and French only at the end of words; cp1252 has them where cp1250 has ě and ů
_WORDS_OF_ONE_LETTER = "àÀéèÉÈóòåöæøàyÅÖ"
_EAST_ASIAN_MARKS = "、。，！？：；「」『』《》（）・ー～“”‘’…—"


def resolve_encoding(path: Path, encoding: str = AUTO) -> str:
    """Returns the configured encoding of a file, or the recognized one if that is `auto`. Raises OSError.

    A file that is not recognized counts as UTF-8, so that its first line that is not is named.
    """
    if encoding != AUTO:
        return UTF8 if codecs.lookup(encoding).name in (UTF8, "utf-8-sig", "ascii") else encoding
    outer = archive_of(path) or path
    status = outer.stat()
    return _recognized(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _recognized(path: Path, changed: int, size: int) -> str:
    with open_bytes(path) as file:
        sample = file.read(BLOCK)
        for mark, encoding in _MARKS.items():
            if sample.startswith(mark):
                # Text in UTF-16 has zero bytes, at least those of its line ends and spaces.
                return encoding if encoding == UTF8 or b"\0" in sample[len(mark) :] else UTF8
        if b"\0" in sample:
            return _wide(sample)
        read = len(sample)
        while sample.isascii() and read < MAX_ASCII and (block := file.read(BLOCK)):
            # With the line before, so that no character is cut at the start.
            sample = sample[sample.rfind(b"\n") + 1 :][-SCORED_BYTES:] + block
            read += len(block)
    return _code_page(sample)


def _wide(sample: bytes) -> str:
    """Returns the UTF-16 encoding of a sample without a mark, or UTF-8 if it looks like a binary file."""
    even, odd = sample[::2].count(0) / len(sample[::2]), sample[1::2].count(0) / max(1, len(sample[1::2]))
    encoding = "utf-16-le" if odd > even else "utf-16-be"
    if sample.count(0) < MIN_WIDE_CHARACTERS or max(even, odd) < MIN_WIDE_SHARE or min(even, odd) > 0:
        return UTF8
    try:
        text = sample[: len(sample) & ~1].decode(encoding, "strict" if len(sample) < BLOCK else "ignore")
    except UnicodeDecodeError:
        return UTF8
    known = sum(char.isspace() or unicodedata.category(char)[0] in "LNPSMZ" for char in text)
    return encoding if known == len(text) else UTF8


def _code_page(sample: bytes) -> str:
    """Returns the encoding whose letters a sample has, or UTF-8 if it is UTF-8, or has none of these encodings."""
    lines = [line for line in sample.splitlines() if not line.isascii()]
    if len(sample) >= BLOCK:
        lines = lines[:-1] or lines
    valid = sum(map(_is_utf8, lines))
    if valid == len(lines) or valid * 2 >= len(lines) - valid:  # the others are damaged lines
        return UTF8
    text = b"\n".join(lines)[:SCORED_BYTES]
    lines = (text[: text.rfind(b"\n")] if len(text) == SCORED_BYTES and b"\n" in text else text).split(b"\n")
    scores = {encoding: round(score, SCORE_DIGITS) for encoding, score in _scores(lines).items()}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= MIN_SCORE else UTF8


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Weighted(NamedTuple):
    """A piece of a text, how often it occurs, and its share of the lines in which it does."""

    text: str
    occurrences: int
    weight: float


def _scores(lines: Sequence[bytes]) -> dict[str, float]:
    """Returns how well each encoding fits lines, from 0 to 1. All lines have equal weight, damaged ones, too."""
    bytes_between = [[line[n - 1 : n + 2] for n in range(1, len(line) - 1) if line[n] > 0x7F]
                     for line in (b" " + line + b" " for line in lines)]  # fmt: skip
    pieces = _weighted(bytes_between)
    found = dict[str, float]()
    for encoding in (*_LATIN, *_OTHER_SCRIPTS):
        decoded = [_Weighted(one.decode(encoding, "replace"), count, weight) for one, count, weight in pieces]
        found[encoding] = _narrow_score(decoded, encoding)
    for encoding in _WIDE:
        text = [[char for char in line.decode(encoding, "replace") if not char.isascii()] for line in lines]
        found[encoding] = _wide_scores([_Weighted(*one) for one in _weighted(text)], encoding)
    return found


def _weighted(lines: Iterable[Sequence[_T]]) -> list[tuple[_T, int, float]]:
    """Returns the distinct parts of lines with their counts and their weights; the weights of a line sum to 1."""
    counts, weights = Counter[_T](), defaultdict[_T, float](float)
    for line in lines:
        for part, count in Counter(line).items():
            counts[part] += count
            weights[part] += count / len(line)
    return [(part, counts[part], weights[part]) for part in counts]


def _narrow_score(pieces: Sequence[_Weighted], encoding: str) -> float:
    """Returns how well pieces of three characters, of which the middle is beyond ASCII, fit an encoding."""
    total = sum(piece.weight for piece in pieces) or 1.0
    if sum(piece.weight for piece in pieces if _is_undecoded(piece.text[1])) > MAX_UNDECODED * total:
        return 0.0
    letters = sum(piece.occurrences for piece in pieces if piece.text[1].isalpha())
    if encoding not in _LATIN:
        often, seldom = _OTHER_SCRIPTS[encoding]
        if letters < FEW_LETTERS:
            return 0.0
        return sum(piece.weight * _char_score(piece.text, often, seldom, 0.5) for piece in pieces) / total
    languages = [letters + letters.upper() for letters in _LATIN[encoding]]
    every = "".join(languages)
    means = [
        sum(piece.weight * _char_score(piece.text, language, every, OTHER_LANGUAGE) for piece in pieces) / total
        for language in languages
    ]
    bonus = LATIN_BONUS * BONUS_LETTERS / (BONUS_LETTERS + letters) if encoding in _BONUS else 0.0
    return max(means) + bonus if max(means) >= MIN_SCORE else max(means)


def _is_undecoded(char: str) -> bool:
    """Returns whether a character is not part of any text: undefined, or one of the control characters C1."""
    return char == UNDECODED or "\x80" <= char < "\xa0"


def _wide_scores(chars: Sequence[_Weighted], encoding: str) -> float:
    total = sum(char.weight for char in chars)
    undecoded = sum(char.weight for char in chars if char.text == UNDECODED)
    if (
        not chars
        or undecoded > MAX_UNDECODED * total
        or sum(c.occurrences for c in chars if c.text.isalpha()) < FEW_LETTERS
    ):
        return 0.0
    return sum(char.weight * _wide_score(char.text, encoding) for char in chars) / total


def _wide_score(char: str, encoding: str) -> float:
    """Returns how likely a character is in an encoding with two bytes for each, from 0 to 1."""
    scripts, frequent = _WIDE[encoding]
    if char == UNDECODED:
        return 0.0
    if scripts and unicodedata.name(char, "").startswith(scripts):
        return 1.0
    if char in _EAST_ASIAN_MARKS:
        return 0.8
    first, *rest = char.encode(encoding)
    is_frequent = first in frequent and (encoding not in _TWO_HIGH_BYTES or rest[0] > 0xA0)
    if not is_frequent:
        return 0.2
    return 1.0 if char in _COMMON.get(encoding, "") else 0.75 if scripts else 0.85 if encoding == "cp949" else 0.9


def _char_score(piece: str, often: str, seldom: str, seldom_score: float) -> float:
    """Returns how likely the middle of three characters is in a text, from 0 to 1."""
    before, char, after = [*piece]
    if unicodedata.category(char) == "Mn":  # a vowel or tone of Thai, which follows a consonant
        return 0.0 if before.isascii() else 1.0 if char in often else seldom_score
    if not char.isalpha():
        # A symbol within a word, as ³ in "s³abe", is a letter of a different encoding; an apostrophe is not.
        if before.isalpha() and after.isalpha() and char not in "’–—":
            return 0.0
        if char == "’" and after.isalpha():  # a quote that closes before a word, as Ά of cp1253 looks in ISO-8859-7
            return 0.0
        return 1.0 if char in _SYMBOLS[0] else 0.5 if char in _SYMBOLS[1] else 0.0
    score = 1.0 if char in often else seldom_score if char in seldom else 0.0
    if score == 0:
        return score
    neighbors = [other for other in (before, after) if other.isalpha()]
    is_inner_capital = char.isupper() and before.islower()
    if not unicodedata.name(char).startswith("LATIN"):
        misplaced = after.isalpha() if char in _FINAL else char in _NOT_FINAL and not after.isalpha()
        return 0.0 if misplaced or is_inner_capital or any(map(str.isascii, neighbors)) else score
    # Words of Latin scripts have few letters beyond ASCII in a row, and no capitals after small letters.
    foreign = sum(not other.isascii() for other in neighbors) == 2 or is_inner_capital
    foreign = foreign or (char in _AT_THE_END and after.isalpha())
    lone = not neighbors and char not in _WORDS_OF_ONE_LETTER
    return score * (0.2 if foreign or lone else 1.0)


def open_utf8(path: Path, encoding: str = AUTO) -> IO[bytes]:
    """Opens a text file, whose content is decoded and encoded as UTF-8 unless it is UTF-8.

    What cannot be decoded becomes the byte 0xff, which is not valid in UTF-8.
    """
    resolved = resolve_encoding(path, encoding)
    file = open_bytes(path)
    return file if resolved == UTF8 else io.BufferedReader(_Transcoded(file, resolved), BLOCK)


def _mark_invalid(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error("sansgpu.mark_invalid", _mark_invalid)


class _Transcoded(io.RawIOBase):
    """Reads text in any encoding as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._file, self._left = file, b""
        self._decoder = codecs.getincrementaldecoder(encoding)("sansgpu.mark_invalid")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = self._file.read(BLOCK)
            text = self._decoder.decode(block, not block)
            self._left = text.encode(UTF8, "surrogateescape")
            if not block:
                break
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

"""Recognizes the encoding of text files, and reads all of them as UTF-8."""

from __future__ import annotations

import codecs
import io
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from sansgpu.data.formats.opening import BLOCK, archive_of, open_bytes

AUTO = "auto"
UTF8 = "utf-8"
MAX_ASCII = 256 << 20  # bytes at the start of a file in which to look for the first ones that are not ASCII
MIN_WIDE_SHARE = 0.4  # share of zero bytes at even or odd places from which a file without a mark is UTF-16
MIN_WIDE_CHARACTERS = 4
MIN_SCORE = 0.55  # mean score of a text's letters from which an encoding is recognized
UNDECODED, MAX_UNDECODED = "\ufffd", 0.1  # share of the characters beyond ASCII that a damaged file may lack
SCORED_BYTES = 1 << 16
LATIN_BONUS = 0.1  # added to the score of cp1252, by far the most frequent encoding that is not Unicode
FEW_LETTERS = 4  # fewer letters beyond ASCII are no evidence of a script other than Latin
_MARKS = {codecs.BOM_UTF8: UTF8, codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
          codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
# For each encoding, the letters that are frequent in its languages, and those that are rarer. The first of several
# with the same score is recognized. Of the statistics-based detectors, charset-normalizer takes "Küche" in cp1252 for
# cp1250 or Korean: short rows of a table need these prior probabilities.
_LETTERS = {
    "cp1252": ("äöüßéèêëàâáãåæøçíìîïñóòôúùœÄÖÜÉÀÇÅØÆ“”‘’–—…€", "õûšžðþýÿÁÂÈÊÍÎÑÓÔÚ°«»¿¡´·§©®™•£½²³ºª„‚\xa0"),
    "cp1250": ("ąćęłńóśźżčěšťůžřýáíéúďňľĺőűöüăâîșțşţŁŚŻČŠŽŘ“”„–—…€", "äëôçŕĂÂÎÁÉ°«»§’‘\xa0"),
    "cp1254": ("çğıöşüİÇĞÖŞÜ“”‘’–—…€", "âîûáéêàè°«»\xa0"),
    "cp1251": ("оеаинтсрвлкмдпуяыьОПНВСКія", "абвгдежзийклмнопрстуфхцчшщъыьэюяёєїґАБГДЕЖЗИЛМРТУФХЦЧШЭЮЯ«»—–…№“”„’\xa0"),
    "koi8_r": ("оеаинтсрвлкмдпуяыьОПНВСК", "абвгдежзийклмнопрстуфхцчшщъыьэюяёАБГДЕЖЗИЛМРТУФХЦЧШЭЮЯ\xa0"),
    "cp1253": ("αοιεστνηυρπκμλςάέήίόύώ", "αβγδεζηθικλμνξοπρσςτυφχψωΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩΆΈΉΊΌΎΏ«»–…’\xa0"),
    "cp1255": ("אבגדהוזחטיךכלםמןנסעףפץצקרשת", "–…\xa0"),
    "cp1256": ("اليمونترةبدع", "سفهقكحجشصذخطزضغثظءأإآؤئى،؟؛\xa0"),
    "mac_roman": ("äöüßéèêëàâáãåæçíìîïñóòôõúùûœøÄÖÜÉÀÇ“”‘’–—…€", "ÅØÆ°«»¿¡´•™\xa0"),
    "cp850": ("äöüßéèêëàâáãåæçíìîïñóòôõúùûøÄÖÜÉÇ", "ÅØÆÀÁ«»¿¡\xa0"),
}  # fmt: skip
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
    text = text[: text.rfind(b"\n")] if len(text) == SCORED_BYTES and b"\n" in text else text
    scores = {encoding: _score(text, encoding) for encoding in (*_LETTERS, *_WIDE)}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= MIN_SCORE else UTF8


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _score(data: bytes, encoding: str) -> float:
    """Returns how well the non-ASCII bytes of a text fit an encoding, from 0 to 1; 0 if many cannot be decoded."""
    text = data.decode(encoding, "replace")
    places = [place for place, char in enumerate(text) if not char.isascii()]
    if text.count(UNDECODED) > MAX_UNDECODED * len(places):
        return 0.0
    lines: dict[int, list[float]] = {}  # so that a damaged line counts no more than any other
    for place in places:
        score = _wide_score(text[place], encoding) if encoding in _WIDE else _char_score(text, place, encoding)
        lines.setdefault(text.rfind("\n", 0, place), []).append(score)
    letters = [text[place] for place in places if text[place].isalpha()]
    if not lines:
        return 0.0
    if len(letters) < FEW_LETTERS and not all(unicodedata.name(letter, "").startswith("LATIN") for letter in letters):
        return 0.0
    mean = sum(sum(scores) / len(scores) for scores in lines.values()) / len(lines)
    return mean + LATIN_BONUS if encoding == "cp1252" and mean >= MIN_SCORE else mean


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


def _char_score(text: str, place: int, encoding: str) -> float:
    """Returns how likely a character is at its place in a text of an encoding with one byte for each, from 0 to 1."""
    char = text[place]
    before, after = text[place - 1 : place] or " ", text[place + 1 : place + 2] or " "
    often, seldom = _LETTERS[encoding]
    score = 1.0 if char in often else 0.5 if char in seldom else 0.0
    if not char.isalpha():
        # A symbol within a word, as ³ in "s³abe", is a letter of a different encoding; an apostrophe is not.
        return 0.0 if before.isalpha() and after.isalpha() and char not in "’–—" else score
    neighbors = [other for other in (before, after) if other.isalpha()]
    if not unicodedata.name(char).startswith("LATIN"):
        misplaced = after.isalpha() if char in _FINAL else char in _NOT_FINAL and not after.isalpha()
        return 0.0 if misplaced or any(map(str.isascii, neighbors)) else score
    # Words of Latin scripts have few letters beyond ASCII in a row, and no capitals after small letters.
    foreign = sum(not other.isascii() for other in neighbors) == 2 or (char.isupper() and before.islower())
    foreign = foreign or (char in _AT_THE_END and after.isalpha())
    lone = not neighbors and char not in _WORDS_OF_ONE_LETTER
    # The code pages of Windows have nearly all of their letters beyond 0x9f, and those of DOS and Macs before it.
    early = encoding in ("cp1250", "cp1252", "cp1254") and char.encode(encoding)[0] < 0xA0
    return score * (0.2 if foreign or lone else 0.5 if early else 1.0)


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

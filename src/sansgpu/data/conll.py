"""Reads the CoNLL format: one token and its tags per line, with an empty line after each sentence.

`conll_layout` finds the columns of a file: CoNLL-U has the word's number first, other files the word or even the tag.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.data.formats.encodings import AUTO
from sansgpu.data.formats.opening import suffix_of
from sansgpu.data.lines import read_lines
from sansgpu.data.rows import ROW_REMEDY, SourceRow

OUTSIDE = "O"
DEFAULT_TAG_COLUMN = -1
MAX_TOKENS = 1_000_000  # tokens per sentence; without a limit, a file without empty lines could exhaust memory
LAYOUT_LINES = 20_000  # lines at the start of a file that decide which columns have the words and the tags
MAX_TAG_COLUMN = 1000  # tags are looked for in the columns before this one; a line of more words is plain text
DOCUMENT_START = "-DOCSTART-"
WORD_NAMES = ("word", "words", "token", "tokens", "form")  # names of columns with words, in lower case
TAG_NAMES = ("tag", "tags", "ner", "ner_tag", "ner_tags", "label", "labels", "entity", "bio", "iob", "iob2")
EMPTY = "_"  # in CoNLL-U
# Labels of phrases in CoNLL-2000 and CoNLL-2003.
CHUNKS = frozenset(["NP", "VP", "PP", "ADJP", "ADVP", "SBAR", "PRT", "CONJP", "INTJ", "LST", "UCP"])
UPOS = 3  # the column with the part of speech in CoNLL-U
ONTONOTES_WORD, ONTONOTES_TAG = 3, 10  # in CoNLL-2012
NUMBERED_RATIO = 0.5  # minimum share of lines whose first column counts the words of a sentence
TAG_RATIO = 0.9  # minimum share of entity tags among the values of a column other than `O`
_BLANKS = re.compile(r"[ \t]+")  # str.split() also splits at Unicode spaces, which tokens of tweets may contain
_NUMBER = re.compile(r"\d+")
_NO_WORD = re.compile(r"\d+[-.]\d+")  # in CoNLL-U, a token of several words, or an empty node
_BRACKET = re.compile(r"\(([^()*]+)\*?(\)?)")


class TagSpelling(NamedTuple):
    """A way to write entity tags, which have a prefix and a label."""

    pattern: re.Pattern[str]
    outside: tuple[str, ...] = (OUTSIDE, "o")

    def standard(self, tag: str) -> str | None:
        """Returns a tag as `O`, or as `B-`, `I-`, `E-` or `S-` and a label; None if it is not spelled this way."""
        if tag in self.outside:
            return OUTSIDE
        found = self.pattern.fullmatch(tag)
        return f"{PREFIXES.get(found['prefix'].upper(), found['prefix'].upper())}-{found['label']}" if found else None


# Other letters than B, I, E (end) and S (single): last and unit in BILOU, middle in BMES, whole in BMEWO.
PREFIXES = {"L": "E", "U": "S", "M": "I", "W": "S"}
USUAL_SPELLING = TagSpelling(re.compile(r"(?P<prefix>[BIESLUMW])-(?P<label>.+)"))
_SPELLINGS = (  # B-PER, b-per, B_PER, B.PER, B:PER, PER-B, PER_B, PER.B
    USUAL_SPELLING,
    TagSpelling(re.compile(r"(?P<prefix>[bieslumw])-(?P<label>.+)")),
    TagSpelling(re.compile(r"(?P<prefix>[BIESLUMW])[_.:](?P<label>.+)")),
    TagSpelling(re.compile(r"(?P<label>.+)[-_.:](?P<prefix>[BIESLUMW])")),
)


def spelling_of(tags: Iterable[str]) -> TagSpelling | None:
    """Returns how the entity tags of a dataset are spelled, or None if it has none.

    Those that begin with `B-`, `I-`, `E-` or `S-` are entity tags even if others are invalid.
    """
    found = set(tags)
    if any(tag[:2] in ("B-", "I-", "E-", "S-") and tag[2:] for tag in found):
        return USUAL_SPELLING
    given = found - {OUTSIDE, "o"}
    if not given or given == found:
        return None
    return next((one for one in _SPELLINGS if _is_spelled(given, one)), None)


def _is_spelled(tags: Collection[str], spelling: TagSpelling) -> bool:
    """Returns whether all tags are spelled this way, or most are and begin and continue the same label."""
    found = [match for tag in tags if (match := spelling.pattern.fullmatch(tag))]
    labels = [{match["label"] for match in found if match["prefix"].upper() == prefix} for prefix in "BI"]
    return len(found) == len(tags) or (2 * len(found) > len(tags) and not labels[0].isdisjoint(labels[1]))


class _TagColumn(NamedTuple):
    """A column with entity tags."""

    key: str | None  # key before the tag in a value such as `SpaceAfter=No|NE=B-PER`
    labels: Counter[str]
    has_empty: bool  # True: `_` is one of its values

    @classmethod
    def of(cls, counts: Mapping[str, int], key: str | None = None) -> _TagColumn | None:
        """Returns the column with these values, or None if few of those other than `O` are entity tags."""
        for spelling in _SPELLINGS:
            labels, others = Counter[str](), 0
            for value, count in counts.items():
                tag = OUTSIDE if value == EMPTY else spelling.standard(value)
                if tag not in (None, OUTSIDE):
                    labels[str(tag).partition("-")[2]] += count
                others += count * (tag == OUTSIDE)
            is_sure = spelling is USUAL_SPELLING or (others > 0 and key is None)
            if labels and is_sure and labels.total() >= TAG_RATIO * (sum(counts.values()) - others):
                return cls(key, labels, EMPTY in counts)
        return None

    def rank(self, number: int) -> tuple[bool, int, int]:
        """Orders columns: entities before chunks such as `B-NP`, then the one with the most, then the last one."""
        return not self.labels.keys() <= CHUNKS, self.labels.total(), number


@dataclass(frozen=True)
class ConllLayout:
    """The columns of a file in CoNLL format."""

    word: int = 0
    tag: int = DEFAULT_TAG_COLUMN
    key: str | None = None  # key before the tag in a column such as `SpaceAfter=No|NE=B-PER`
    width: int = 0  # usual number of columns
    header: bool = False  # True: the first line has the names of the columns
    commas: bool = False  # True: the columns are separated by commas
    numbered: bool = False  # True: column 0 counts the words of a sentence, as in CoNLL-U
    brackets: bool = False  # True: the tags of CoNLL-2012, e.g. `(PERSON*`, `*)`
    empty: str | None = None  # a value that stands for "no entity"
    others: tuple[int, ...] = ()  # further columns that have entity tags
    has_entities: bool = field(default=False, compare=False)  # True: the tags' column has entity tags

    def columns(self, line: str) -> list[str]:
        return _comma_columns(line) if self.commas else conll_columns(line)

    def is_comment(self, line: str, columns: Sequence[str], at_start: bool) -> bool:
        """Returns whether a line is a comment. `at_start`: no word of its sentence precedes it."""
        if columns[:1] == ["#begin"] or columns[:1] == ["#end"]:
            return True
        is_odd = len(columns) > 1 and (len(columns) != self.width or "=" in columns[-1])
        return line.startswith("#") and (self.numbered or (at_start and is_odd and line[1:2].isspace()))

    def place(self, columns: Sequence[str]) -> int | None:
        """Returns the index of the tag's column in a line, or None if the line has no word or no tag."""
        place = self.tag if self.tag >= 0 else len(columns) + self.tag
        return place if 0 <= place < len(columns) > self.word != place else None

    def described(self) -> str | None:
        """Returns a message about the columns, or None if they are the first and the last of two."""
        if self == ConllLayout(width=self.width) and self.width <= 2:
            return None
        place = self.tag % self.width if self.width else self.tag
        kind = f" ({self.key}=)" if self.key else ""
        last = ", the last" if place == self.width - 1 and not kind else ""
        found = f"word = column {self.word}, tag = column {place}{kind}{last}"
        if self.others:
            columns = " and ".join(map(str, self.others))
            found += f" (column{'s' * (len(self.others) > 1)} {columns} also has entity tags; data.tag_column sets it)"
        elif self.numbered or not last:
            found += " (data.tag_column sets it)"
        rest = [str(column) for column in range(self.numbered, self.width) if column not in (self.word, place)]
        verb = "columns {} are" if len(rest) > 1 else "column {} is"
        return found + (f"; {verb.format(', '.join(rest))} not used" if rest else "")


def conll_rows(path: Path, tag_column: int | None, encoding: str = AUTO) -> Iterator[SourceRow]:
    """Yields a row {"tokens": [...], "tags": [...]} for each sentence of a file.

    The location of a sentence is its first line. If a line is invalid, the row of its sentence has a `problem`. Raises
    ConfigError if a sentence is longer than `MAX_TOKENS`.
    """
    layout = conll_layout(path, tag_column, encoding)
    sentence, at_header = _Sentence(layout), layout.header
    for line in read_lines(path, blank=True, encoding=encoding):
        columns = [] if line.problem else layout.columns(line.value)
        if line.problem is None and (not columns or columns[0] == DOCUMENT_START):
            yield from sentence.rows()
            sentence = _Sentence(layout)
        elif at_header and line.problem is None:
            at_header = False
        elif line.problem is None and layout.is_comment(line.value, columns, sentence.is_empty):
            continue
        elif not (layout.numbered and columns and _NO_WORD.fullmatch(columns[0])):
            sentence.add(line, columns)
    yield from sentence.rows()


def as_text(sentence: SourceRow) -> SourceRow:
    """Returns a row whose value is the sentence as one string, with spaces between the tokens."""
    return sentence if sentence.problem else sentence._replace(value=" ".join(sentence.value["tokens"]))


class _Sentence:
    def __init__(self, layout: ConllLayout) -> None:
        self._layout = layout
        self._tokens: list[str] = []
        self._tags: list[str] = []
        self._where = ""
        self._problem: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self._where

    def add(self, line: SourceRow, columns: list[str]) -> None:
        self._where = self._where or line.where
        problem, place = line.problem, self._layout.place(columns)
        if problem is None and place is None:
            problem = (
                f"{line.where} has {counted(len(columns), 'column')}, so there is no tag in column {self._layout.tag}; "
                "fix the line or set data.tag_column."
            )
        elif problem is None and self._layout.numbered and not _NUMBER.fullmatch(columns[0]):
            problem = f"{line.where} does not begin with the number of a word like the other lines{ROW_REMEDY}"
        if problem is None and place is not None:
            self._tokens.append(columns[self._layout.word])
            self._tags.append(_tag_in(columns[place], self._layout))
        self._problem = self._problem or problem
        if len(self._tokens) > MAX_TOKENS:
            raise ConfigError(
                f"{self._where}: the sentence has more than {MAX_TOKENS:,} tokens; put an empty line between sentences."
            )

    def rows(self) -> Iterator[SourceRow]:
        if self._problem:
            yield SourceRow(self._where, None, self._problem)
        elif self._where:
            tags = _without_brackets(self._tags) if self._layout.brackets else self._tags
            yield SourceRow(self._where, {"tokens": self._tokens, "tags": tags})


def _tag_in(value: str, layout: ConllLayout) -> str:
    if layout.key is not None:
        return _attributes(value).get(layout.key, OUTSIDE)
    return OUTSIDE if value == layout.empty else value


def _attributes(value: str) -> dict[str, str]:
    """Returns the keys and values of a column such as `SpaceAfter=No|NE=B-PER`."""
    parts = (part.partition("=") for part in value.split("|"))
    return {key: found for key, equals, found in parts if equals and found not in ("", EMPTY)}


def _without_brackets(values: Iterable[str]) -> list[str]:
    """Converts CoNLL-2012's brackets, e.g. `(PERSON*`, `*)`, `*`, to IOB2 tags."""
    tags, label = list[str](), ""
    for value in values:
        if start := _BRACKET.match(value):
            label = start[1]
            tags.append(f"B-{label}")
        else:
            tags.append(f"I-{label}" if label else OUTSIDE)
        if value.endswith(")"):
            label = ""
    return tags


def conll_columns(line: str) -> list[str]:
    """Splits a line at tabs or, if it has none, at spaces; an empty line has no columns."""
    stripped = line.strip(" \t\r\n")
    if "\t" in stripped:
        return [column.strip(" ") for column in stripped.split("\t")]
    return _BLANKS.split(stripped) if stripped else []


def _comma_columns(line: str) -> list[str]:
    try:
        columns = next(csv.reader([line.strip("\r\n")]), [])
    except csv.Error:
        return [line]  # has no tag, so it is a bad line
    return columns if any(column.strip() for column in columns) else []


def conll_layout(path: Path, tag_column: int | None = None, encoding: str = AUTO) -> ConllLayout:
    """Finds the columns of a file by its first lines. A given `tag_column` has the tags."""
    first = islice(read_lines(path, blank=True, encoding=encoding), LAYOUT_LINES)
    lines = [line.value for line in first if line.problem is None]
    if lines and lines[0].startswith("#FORMAT=WebAnno"):
        raise ConfigError(f"{path} is in the format of WebAnno and INCEpTION; export the document as CoNLL 2003.")
    commas = suffix_of(path) == ".csv" and not any("\t" in line for line in lines) and _has_commas(lines)
    draft = ConllLayout(commas=commas)
    split = [(line, draft.columns(line)) for line in lines]
    tokens = [columns for line, columns in split if columns and line[0] != "#" and columns[0] != DOCUMENT_START]
    tokens = tokens or [columns for _, columns in split if columns and columns[0] != DOCUMENT_START]
    width = Counter(map(len, tokens)).most_common(1)[0][0] if tokens else 0
    if any(columns[:2] == ["#begin", "document"] for _, columns in split) and width > ONTONOTES_TAG + 1:
        tag = ONTONOTES_TAG if tag_column is None else tag_column
        return ConllLayout(ONTONOTES_WORD, tag, width=width, brackets=tag in (ONTONOTES_TAG, ONTONOTES_TAG - width))
    numbered = width > 1 and _counts_words([columns for line, columns in split if line[:1] != "#"])
    header = _header(tokens[0]) if tokens and not numbered else None
    others: tuple[int, ...] = ()
    found = _tag_columns(tokens[header is not None :], width, first=int(numbered))
    if tag_column is not None:
        tag = tag_column
    elif header is not None:
        tag = DEFAULT_TAG_COLUMN if header[1] == width - 1 else header[1]
    else:
        tag, others = _chosen(found, width, numbered)
    place = tag % width if width and -width <= tag < width else tag
    word = header[0] if header else int(numbered)
    word = word + 1 if word == place and width > word + 1 else word
    column = found.get(place)
    key, has_empty = (column.key, column.has_empty) if column else (None, False)
    empty = EMPTY if has_empty and key is None else None
    layout = ConllLayout(word, tag, key, width, header is not None, commas, numbered, empty=empty, others=others)
    return replace(layout, has_entities=column is not None)


def _has_commas(lines: Iterable[str]) -> bool:
    given = [line for line in lines if line.strip()]
    return bool(given) and all("," in line for line in given)


def _header(columns: Sequence[str]) -> tuple[int, int] | None:
    """Returns the numbers of the words' and the tags' column if a first line names them."""
    names = [column.strip().casefold() for column in columns]
    words, tags = ([names.index(name) for name in known if name in names] for known in (WORD_NAMES, TAG_NAMES))
    return (words[0], tags[0]) if words and tags else None


def _counts_words(lines: Iterable[Sequence[str]]) -> bool:
    """Returns whether the first column numbers the words of each sentence from 0 or 1. Empty lines have no columns."""
    counting = total = 0
    before: int | None = None
    for columns in lines:
        if not columns:
            before = None
        elif not _NO_WORD.fullmatch(columns[0]):
            number = int(columns[0]) if _NUMBER.fullmatch(columns[0]) and len(columns[0]) < 8 else -1
            counting += number in (0, 1) if before is None else number == before + 1
            total, before = total + 1, number
    return total > 0 and counting >= NUMBERED_RATIO * total


def _tag_columns(tokens: Iterable[Sequence[str]], width: int, first: int) -> dict[int, _TagColumn]:
    """Finds the columns from number `first` whose values are entity tags or have a key for one."""
    values: dict[int, Counter[str]] = defaultdict(Counter)
    keyed: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for columns in tokens:
        for number, value in enumerate(columns[first:MAX_TAG_COLUMN], first) if len(columns) == width else ():
            values[number][value] += 1
            for key, found in _attributes(value).items() if "=" in value else ():
                keyed[number, key][found] += 1
    candidates = [(number, _TagColumn.of(counts, key)) for (number, key), counts in keyed.items()]
    candidates += [(number, _TagColumn.of(counts)) for number, counts in values.items()]
    usable = sorted(
        ((column.rank(number), number, column) for number, column in candidates if column), key=itemgetter(0)
    )
    return {number: column for _, number, column in usable}


def _chosen(found: Mapping[int, _TagColumn], width: int, numbered: bool) -> tuple[int, tuple[int, ...]]:
    """Returns the number of the tags' column, and the other columns that have entity tags.

    Without entity tags, it is the part of speech in CoNLL-U, otherwise the last column.
    """
    if not found:
        return (UPOS if numbered and width > UPOS + 1 else DEFAULT_TAG_COLUMN), ()
    best = max(found, key=lambda number: found[number].rank(number))
    others = tuple(sorted(number for number in found if number != best))
    return (DEFAULT_TAG_COLUMN if best == width - 1 else best), others

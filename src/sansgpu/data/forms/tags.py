"""Texts with tagged words: CoNLL sentences and rows with `tokens` and `tags`, or with `text` and `spans`.

W words of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex
from tokenizers.pre_tokenizers import BertPreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.data.conll import DEFAULT_TAG_COLUMN, conll_columns
from sansgpu.data.formats.names import TABLES
from sansgpu.data.formats.opening import suffix_of
from sansgpu.data.forms.form import Form, Forms, any_row
from sansgpu.data.lines import read_lines
from sansgpu.data.rows import Row, SourceRow, TypedRow, column_names
from sansgpu.data.tables import MAX_FIRST_LINES, Columns, is_table

OUTSIDE = "O"
TAG_COLUMNS = ("tags", "ner_tags")
CONLL_SUFFIXES = (*TABLES, ".txt")  # files that may have CoNLL columns, in addition to .conll
_SPAN_KEYS = ("start", "end", "label", "text")
# How texts are split into words: as in BERT, by white space and punctuation, and by character in unspaced scripts.
_UNSPACED = Regex(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_WORDS = Steps([BertPreTokenizer(), Split(_UNSPACED, "isolated")])


class WordSpan(NamedTuple):
    """Words [start, stop) with a label."""

    start: int
    stop: int
    label: str


def iob2_tags(spans: Iterable[WordSpan], words: int) -> tuple[str, ...]:
    """Returns the IOB2 tags of a sentence: `B-` for the first word of each span and `I-` for its other words."""
    tags = [OUTSIDE] * words
    for span in spans:
        tags[span.start : span.stop] = [f"B-{span.label}", *[f"I-{span.label}"] * (span.stop - span.start - 1)]
    return tuple(tags)


@dataclass(frozen=True, eq=False)
class TaggedText(TypedRow):
    """A text with its words. `tags` has one tag per word, or is empty if the row has no tags."""

    text: str
    starts: np.ndarray  # (W,) int32: start character of each word
    ends: np.ndarray  # (W,) int32: end character of each word
    tags: tuple[str, ...] = ()
    moved_spans: int = 0  # spans that do not start and end at word boundaries, or have no words of their own

    def word(self, number: int) -> str:
        return self.text[self.starts[number] : self.ends[number]]


def untagged_text(row: SourceRow) -> TaggedText:
    """Reads the `text` or the `tokens` of a row without its tags. Raises BadRowError if it is invalid."""
    return _words(row) if "tokens" in row.columns(TAGGED.needed) else _text(row)


def _has_tokens(row: Row, columns: Columns) -> bool:
    return "tokens" in row


def _tagged(row: SourceRow, columns: Columns) -> TaggedText:
    text = _words(row)
    key = next((key for key in TAG_COLUMNS if row.value.get(key) is not None), None)
    if key is None:
        raise row.error(f"it has no {' or '.join(TAG_COLUMNS)}")
    tags = row.value[key]
    if not isinstance(tags, list):
        raise row.error(f"its {key} are of type {type(tags).__name__} instead of a list")
    if len(tags) != len(text.starts):
        raise row.error(f"its {key} have {counted(len(tags), 'value')} for {counted(len(text.starts), 'token')}")
    if any(isinstance(tag, int) for tag in tags):
        raise row.error(f"its {key} are numbers without names; write each tag as a string")
    return replace(text, tags=tuple(row.valid_text(tag, key) for tag in tags))


def _words(row: SourceRow) -> TaggedText:
    """Joins the tokens of a row with spaces into a text whose words are these tokens."""
    tokens = row.value["tokens"]
    if not isinstance(tokens, list) or not tokens:
        raise row.error("its tokens are not a non-empty list")
    for number, token in enumerate(tokens):
        if not row.valid_text(token, "tokens"):
            raise row.error(f"token {number} is empty")
    if not "".join(tokens).strip():
        raise row.error("its tokens contain only white space")
    ends = np.cumsum([len(token) + 1 for token in tokens]) - 1
    starts = ends - [len(token) for token in tokens]
    return TaggedText(row.where, " ".join(tokens), starts.astype(np.int32), ends.astype(np.int32))


def _text(row: SourceRow) -> TaggedText:
    if "text" not in row.value:
        raise row.error(
            f"it has the columns {column_names(row.value)}, but needs `tokens` and `tags`, or `text` and `spans`"
        )
    text = row.required_text("text")
    places = [place for _, place in _WORDS.pre_tokenize_str(text)]
    starts, ends = np.array(places, np.int32).reshape(-1, 2).T
    return TaggedText(row.where, text, starts, ends)


def _with_spans(row: SourceRow, columns: Columns) -> TaggedText:
    """Tags all words that share a character with a span."""
    text = _text(row)
    given = row.value.get("spans")
    if not isinstance(given, list):
        raise row.error("it has no list `spans`; write an empty list for a text without spans")
    spans = sorted(_span(row, text.text, number, span) for number, span in enumerate(given))
    found: list[WordSpan] = []
    moved, last_stop, last_end = 0, 0, 0
    for begin, end, label in spans:
        if begin < last_end:
            raise row.error(f"the span from {begin} to {end} overlaps with the previous span")
        start = max(last_stop, int(np.searchsorted(text.ends, begin, side="right")))
        stop = int(np.searchsorted(text.starts, end, side="left"))
        if start < stop:
            found.append(WordSpan(start, stop, label))
            last_stop = stop
        moved += start >= stop or (text.starts[start], text.ends[stop - 1]) != (begin, end)
        last_end = end
    return replace(text, tags=iob2_tags(found, len(text.starts)), moved_spans=moved)


def _span(row: SourceRow, text: str, number: int, span: Any) -> tuple[int, int, str]:
    """Returns a span as (start character, end character, label) after checking it."""
    name = f"span {number}"
    if not isinstance(span, dict):
        raise row.error(f"{name} is not an object with start, end and label")
    if unknown := next((key for key in span if key not in _SPAN_KEYS), None):
        raise row.error(f"{name} has the unknown key {unknown!r}; the keys of a span are {', '.join(_SPAN_KEYS)}")
    start, end, label = span.get("start"), span.get("end"), span.get("label")
    if not (type(start) is int and type(end) is int):
        raise row.error(f"{name} is from {start!r} to {end!r}, which are not both integers")
    if not isinstance(label, str) or not row.valid_text(label, "label").strip() or label == OUTSIDE:
        raise row.error(f"{name} has the label {label!r}, which is not an entity name")
    if not 0 <= start < end <= len(text):
        raise row.error(f"{name} from {start} to {end} is empty or not within the {len(text)} characters of the text")
    if not text[start:end].strip():
        raise row.error(f"{name} from {start} to {end} contains only white space")
    if span.get("text") not in (None, text[start:end]):
        raise row.error(f"{name} has the text {span['text']!r}, but its characters are {text[start:end]!r}")
    return start, end, label


def number_tag_column(paths: Sequence[Path], columns: Columns) -> tuple[Columns, str | None]:
    """Returns the number of the tags' column, with a message, if all files are in CoNLL format.

    Raises ConfigError if a .csv or .tsv file is not in CoNLL format, because a table cannot hold tags otherwise.
    """
    others = [path for path in paths if suffix_of(path) in CONLL_SUFFIXES]
    if columns.tag is not None or not others:
        return columns, None
    wrong = [path for path in others if not _has_tagged_words(path, columns.encoding)]
    if table := next(filter(is_table, wrong), None):
        raise ConfigError(
            f"{table} does not look like CoNLL columns (one word with its tag per line, and an empty line after each "
            "sentence), which is the only way to store tags in a table; if it is in that format, set data.tag_column "
            "to the number of the tags' column, or -1 for the last."
        )
    if wrong or any(suffix_of(path) not in (*CONLL_SUFFIXES, ".conll") for path in paths):
        return columns, None
    found = f"word = column 0, tag = column {DEFAULT_TAG_COLUMN}, the last"
    note = f"{others[0]}: its lines look like words with tags, so it is read as CoNLL columns: {found}"
    return replace(columns, tag=DEFAULT_TAG_COLUMN), note


def _has_tagged_words(path: Path, encoding: str) -> bool:
    """Returns whether a file looks like CoNLL: it has empty lines, and the first tag recurs with a different word."""
    first: list[str] = []
    has_ends = is_repeated = False
    for line in islice(read_lines(path, True, encoding), MAX_FIRST_LINES):
        columns = [] if line.problem else conll_columns(line.value)
        if not first:
            first = columns
            if len(first) == 1 and first[0] != "-DOCSTART-":
                return False
            first = [] if len(first) == 1 else first
        elif not columns:
            has_ends = has_ends or not line.problem
        elif columns[0] != first[0] and columns[-1] == first[-1]:
            is_repeated = True
        if has_ends and is_repeated:
            return not {value.casefold() for value in first} & {"text", "tokens", "spans", *TAG_COLUMNS}
    return False


TAGGED = Forms("tokens and tags, or text and spans", (
    Form(("tokens", "tags"), _tagged,
         {"tokens": ["Ada", "lived", "in", "London"], "tags": ["B-PER", "O", "O", "B-LOC"]},
         ("ner_tags",), _has_tokens),
    Form(("text", "spans"), _with_spans,
         {"text": "Ada lived in London.", "spans": [{"start": 0, "end": 3, "label": "PER"}]}, recognizes=any_row),
), resolve=number_tag_column)  # fmt: skip

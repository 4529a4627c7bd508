"""Reads texts with tagged words: CoNLL sentences, rows with `tokens` and `tags`, or rows with `text` and `spans`.

W words of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex
from tokenizers.pre_tokenizers import BertPreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted, truncate
from sansgpu.data.conll import DEFAULT_TAG_COLUMN, conll_columns
from sansgpu.data.files import file_form, read_lines
from sansgpu.data.headers import MAX_LINES, TABLES
from sansgpu.data.rows import BadRows, SourceRow, column_names
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import local_files
from sansgpu.tasks.tokens.spans import (
    OUTSIDE,
    WordSpan,
    has_entities,
    iob2_tags,
    labels_of,
    scheme_of,
    spans_of,
    tag_flaw,
)

TAG_COLUMNS = ("tags", "ner_tags")
_SPAN_KEYS = ("start", "end", "label", "text")
# How texts are split into words: as in BERT, by white space and punctuation, and by character in unspaced scripts.
_UNSPACED = Regex(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_WORDS = Steps([BertPreTokenizer(), Split(_UNSPACED, "isolated")])


@dataclass(frozen=True, eq=False)
class TaggedText:
    """A text with its words. `tags` has one tag per word, or is empty if the row has no tags."""

    where: str
    text: str
    starts: np.ndarray  # (W,) int32: start character of each word
    ends: np.ndarray  # (W,) int32: end character of each word
    tags: tuple[str, ...] = ()
    moved_spans: int = 0  # spans that do not start and end at word boundaries, or have no words of their own

    def word(self, number: int) -> str:
        return self.text[self.starts[number] : self.ends[number]]


def read_tagged(rows: Iterable[SourceRow], bad_rows: BadRows) -> list[TaggedText]:
    """Reads texts with tags. If any tag follows an entity scheme, all others must, too."""
    texts = list(bad_rows.parsed(rows, _tagged))
    entities = any(has_entities(text.tags) for text in texts)

    def in_scheme(text: TaggedText) -> TaggedText:
        if flaw := next(filter(None, (tag_flaw(tag, entities) for tag in text.tags)), None):
            raise SourceRow(text.where, None).error(flaw)
        return text

    return list(bad_rows.parsed(texts, in_scheme))


def read_untagged(row: SourceRow) -> TaggedText:
    """Reads the `text` or the `tokens` of a row without its tags. Raises BadRowError if it is invalid."""
    return _words(row) if "tokens" in _columns(row) else _text(row)


def in_iob2(texts: list[TaggedText], name: str, notes: list[str], always: bool = False) -> list[TaggedText]:
    """Converts IOB1 and BIOES tags, or any tags if `always`, to IOB2. Appends a message about changes to `notes`."""
    scheme = scheme_of(text.tags for text in texts)
    moved = sum(text.moved_spans for text in texts)
    if moved:
        notes.append(f"{name}: {moved:,} spans start or end inside a word and were extended to whole words.")
    if scheme in ("IOB1", "BIOES"):
        notes.append(f"{name}: the tags are {scheme} and were converted to IOB2.")
    elif not (always and scheme == "IOB2"):
        return texts
    return [replace(text, tags=iob2_tags(spans_of(text.tags), len(text.tags))) for text in texts]


def require_labels(texts: Iterable[TaggedText], name: str) -> list[str]:
    """Returns the labels for the tags in the texts. Raises ConfigError if there is only one."""
    labels = labels_of(tag for text in texts for tag in text.tags)
    if len(labels) == 1:
        raise ConfigError(
            f"{name}: every word has the tag {labels[0]!r}, so there is nothing to learn; tag more words."
        )
    return labels


def with_targets(
    texts: list[TaggedText], labels: Sequence[str], bad_rows: BadRows
) -> tuple[list[TaggedText], list[np.ndarray]]:
    """Returns the texts whose tags are all in `labels`, and the label ids of their words, (W,) each."""
    numbers = {label: number for number, label in enumerate(labels)}

    def target(text: TaggedText) -> tuple[TaggedText, np.ndarray]:
        if unknown := next((tag for tag in text.tags if tag not in numbers), None):
            raise SourceRow(text.where, None).error(
                f"its tag {unknown!r} is not one of the model's labels ({truncate(', '.join(labels))})"
            )
        return text, np.array([numbers[tag] for tag in text.tags], np.int64)

    found = list(bad_rows.parsed(texts, target))
    return [text for text, _ in found], [ids for _, ids in found]


def _columns(row: SourceRow) -> dict[str, Any]:
    if not isinstance(row.readable_value(), dict):
        raise row.error(
            f"it is of type {type(row.value).__name__} instead of an object with tokens and tags, or text and spans"
        )
    columns: dict[str, Any] = row.value
    if "tokens" not in columns and "text" not in columns:
        raise row.error(
            f"it has the columns {column_names(columns)}, but needs `tokens` and `tags`, or `text` and `spans`"
        )
    return columns


def _tagged(row: SourceRow) -> TaggedText:
    columns = _columns(row)
    if "tokens" not in columns:
        return _with_spans(row, _text(row))
    text = _words(row)
    key = next((key for key in TAG_COLUMNS if columns.get(key) is not None), None)
    if key is None:
        raise row.error(f"it has no {' or '.join(TAG_COLUMNS)}")
    tags = columns[key]
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
    text = row.value.get("text")
    if not isinstance(text, str) or not text.strip():
        raise row.error("it has no text")
    places = [place for _, place in _WORDS.pre_tokenize_str(row.valid_text(text, "text"))]
    starts, ends = np.array(places, np.int32).reshape(-1, 2).T
    return TaggedText(row.where, text, starts, ends)


def _with_spans(row: SourceRow, text: TaggedText) -> TaggedText:
    """Tags all words that share a character with a span."""
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


TAGGED_FORMS = (*TABLES, ".txt")  # file types that may contain CoNLL columns, in addition to .conll
TAGGED_NAMES = frozenset(("text", "tokens", "spans", *TAG_COLUMNS))


def number_tag_column(data: TaggedDataConfig) -> tuple[TaggedDataConfig, str | None]:
    """Sets data.tag_column to a column number if all files are in CoNLL format.

    Returns the settings and a message about the columns, or None if nothing was set. Raises ConfigError if a .csv or
    .tsv file is not in CoNLL format, because a table cannot hold tags otherwise.
    """
    files = local_files(data)
    others = [path for path in files if file_form(path) in TAGGED_FORMS]
    if data.tag_column is not None or not others:
        return data, None
    wrong = [path for path in others if not _has_tagged_words(path)]
    if table := next((path for path in wrong if file_form(path) in TABLES), None):
        raise ConfigError(
            f"{table} does not look like CoNLL columns (one word with its tag per line, and an empty line after each "
            "sentence), which is the only way to store tags in a table; if it is in that format, set data.tag_column "
            "to the number of the tags' column, or -1 for the last."
        )
    if wrong or any(file_form(path) not in (*TAGGED_FORMS, ".conll") for path in files):
        return data, None
    columns = f"word = column 0, tag = column {DEFAULT_TAG_COLUMN}, the last"
    clause = f"{others[0]}: its lines look like words with tags, so it is read as CoNLL columns: {columns}"
    return data.model_copy(update={"tag_column": DEFAULT_TAG_COLUMN}), clause


def _has_tagged_words(path: Path) -> bool:
    """Returns whether a file looks like CoNLL: it has empty lines, and the first tag recurs with a different word."""
    first: list[str] = []
    has_ends = is_repeated = False
    for line in islice(read_lines(path, blank=True), MAX_LINES):
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
            return not {value.casefold() for value in first} & TAGGED_NAMES
    return False

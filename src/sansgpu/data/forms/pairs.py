"""Texts for embedding models: pairs with negatives, pairs with a similarity score, and texts with a label."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sansgpu.data.forms.form import Form, Forms, any_row
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import (
    BadRowError,
    Column,
    Row,
    SourceRow,
    TypedRow,
    column_names,
    find_column,
    missing_column,
)
from sansgpu.data.tables import Columns, first_lines_of_data

RowKind = Literal["pairs", "scores", "labels"]
# The kinds in words, for messages.
KINDS: dict[RowKind, str] = {
    "pairs": "an anchor and a positive",
    "scores": "two texts and a score",
    "labels": "a text and a label",
}
TRIPLET_COLUMNS = ("anchor", "positive", "negative")
SCORE_WORDS = ("score", "similarity")  # in names of columns whose numbers are larger for texts of similar meaning
# Pairs of text columns to try, in this order, if none is configured.
PAIR_COLUMNS = (
    ("text1", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text", "text_pair"),
)
LABEL_COLUMNS = ("label", "gold_label", "is_duplicate")  # of two texts
SCORE_COLUMNS = ("score", "similarity_score", "similarity", "relatedness_score", *LABEL_COLUMNS)


@dataclass(frozen=True)
class TextRow(TypedRow):
    """The texts of a row: an anchor with a positive and negatives, two texts with a score, or a text with a label."""

    texts: tuple[str, ...]
    score: float | None = None
    label: str | None = None
    pair_label: str | None = None  # of two texts in a label column: a score or a class, such as of NLI

    @property
    def kind(self) -> RowKind:
        if self.score is not None or self.pair_label is not None:
            return "scores"
        return "labels" if self.label is not None else "pairs"


def read_text_rows(
    rows: Iterable[SourceRow], columns: Columns, bad_rows: RowReport, kind: RowKind | None = None
) -> list[TextRow]:
    """Reads rows in order. All must be of one `kind`, by default that of the first row."""

    def read(row: SourceRow) -> TextRow:
        nonlocal kind
        found = TEXT_GROUPS.read(row, columns, bad_rows)
        kind = kind or found.kind
        if found.kind != kind:
            raise found.error(f"it has {KINDS[found.kind]}, but the rows before it have {KINDS[kind]}")
        return found

    return list(bad_rows.parsed(rows, read))


def _is_anchored(row: Row, columns: Columns) -> bool:
    return columns.text is None and columns.pair is None and bool({"anchor", "positive"} & set(row))


def _anchored(row: SourceRow, columns: Columns) -> TextRow:
    anchor, positive, negative = TRIPLET_COLUMNS
    given = row.value.get(negative)
    negatives = [] if given is None or given == "" else given if isinstance(given, list) else [given]
    texts = _column_text(row, anchor), _column_text(row, positive)
    return TextRow(row.where, (*texts, *(_text(row, negative, text) for text in negatives)))


def _usual_pair(row: Row) -> tuple[str, str] | None:
    return next(((first, second) for first, second in PAIR_COLUMNS if first in row and second in row), None)


def _has_two_texts(row: Row, columns: Columns) -> bool:
    return columns.pair is not None or (columns.text is None and _usual_pair(row) is not None)


def _scored(row: SourceRow, columns: Columns) -> TextRow:
    if columns.pair is None:
        first, second = _usual_pair(row.value) or PAIR_COLUMNS[0]
    else:
        first, second = _set_column(row, columns.text, "text"), _set_column(row, columns.pair)
    texts = _column_text(row, first), _column_text(row, second)
    score = find_column(row.value, columns.label, SCORE_COLUMNS)
    if score is None and columns.label is None and columns.pair is not None:
        return TextRow(row.where, texts)  # the configuration names both columns, so the pair needs no score
    value = row.value.get(score)
    if score is None or any(word in str(score).casefold() for word in SCORE_WORDS):
        return TextRow(row.where, texts, score=_score(row, value))
    word = str(int(value)) if isinstance(value, bool) else str(value if value is not None else "").strip()
    if not word:
        raise row.error(f"it has no {score}")
    return TextRow(row.where, texts, score=_finite(word), pair_label=row.valid_text(word, str(score)))


def _labeled(row: SourceRow, columns: Columns) -> TextRow:
    if columns.text is None and "text" not in row.value:
        raise BadRowError(
            f"{row.where} has the columns {column_names(row.value)}; rows need anchor and positive, text1, text2 and "
            "score, or text and label, or set data.text_column, data.text_pair_column and data.label_column."
        )
    text = _column_text(row, _set_column(row, columns.text, "text"))
    return TextRow(row.where, (text,), label=_label(row, "label" if columns.label is None else columns.label))


def _set_column(row: SourceRow, column: Column | None, otherwise: str = "") -> Any:
    """Returns the key of a column that the configuration names. Raises BadRowError if it does not exist."""
    if column is None:
        return otherwise
    if (key := find_column(row.value, column)) is None:
        raise missing_column(row.value, column, "data.text_column and data.text_pair_column", row.where)
    return key


def _column_text(row: SourceRow, column: Any) -> str:
    return _text(row, str(column), row.value.get(column))


def _text(row: SourceRow, name: str, text: Any) -> str:
    if text is None:
        raise row.error(f"it has no {name}")
    text = row.valid_text(text, name)
    if not text.strip():
        raise row.error(f"its {name} is empty")
    return str(text)


def _label(row: SourceRow, column: Column) -> str:
    value = row.value.get(find_column(row.value, column))
    if value is None or (isinstance(value, str) and not value.strip()):
        raise row.error(f"it has no {column}")
    if not isinstance(value, (str, int)):
        raise row.error(f"its {column} is {value!r} instead of a string or an integer")
    return row.valid_text(str(value).strip(), str(column))


def _score(row: SourceRow, value: Any) -> float:
    if value is None or value == "":
        raise row.error("it has no score")
    score = None if isinstance(value, bool) else _finite(value)
    if score is None:
        raise row.error(f"its score is {value!r} instead of a finite number")
    return score


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def require_names(paths: Sequence[Path], columns: Columns) -> tuple[Columns, str | None]:
    """Raises ConfigError if the first line of a table looks like data, because columns are found by name."""
    usual = (*TRIPLET_COLUMNS, *SCORE_COLUMNS, *(name for pair in PAIR_COLUMNS for name in pair))
    for first in first_lines_of_data(paths, columns, columns.named or usual):
        if first.looks_like_data:
            raise first.refusal(
                "set data.text_column, data.text_pair_column and data.label_column to the numbers of their columns, or "
                "add a first line with names such as text1, text2 and score"
            )
    return columns, None


TEXT_GROUPS = Forms("texts", (
    Form(("anchor", "positive"), _anchored,
         {"anchor": "What is a fox?", "positive": "A fox is an animal.", "negative": "The sky is blue."},
         ("negative",), _is_anchored),
    Form(("text1", "text2", "score"), _scored,
         {"text1": "A plane takes off.", "text2": "An airplane departs.", "score": 0.9},
         (*(name for pair in PAIR_COLUMNS[1:] for name in pair), *SCORE_COLUMNS), _has_two_texts),
    Form(("text", "label"), _labeled, {"text": "A great film.", "label": "good"}, recognizes=any_row),
), text_rows=True, resolve=require_names)  # fmt: skip

"""Parses rows for embedding models: pairs with negatives, pairs with a similarity score, and texts with a label."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sansgpu.config import DataConfig
from sansgpu.data.files import file_form
from sansgpu.data.headers import TABLES, FirstLine
from sansgpu.data.rows import BadRowError, BadRows, SourceRow, column_key, column_names
from sansgpu.data.sources import local_files

RowForm = Literal["pairs", "scores", "labels"]
FORMS: dict[RowForm, str] = {
    "pairs": "an anchor and a positive",
    "scores": "two texts and a score",
    "labels": "a text and a label",
}
PAIR_COLUMNS = ("anchor", "positive", "negative")
# Pairs of text columns to try, in this order, if the configuration does not name them.
TEXT_COLUMNS = (("text1", "text2"), ("sentence1", "sentence2"), ("text", "text_pair"))
SCORE_COLUMNS = ("score", "similarity_score", "similarity", "label")


@dataclass(frozen=True)
class TextRow:
    """The texts of a row: an anchor with a positive and negatives, two texts with a score, or a text with a label."""

    where: str
    texts: tuple[str, ...]
    score: float | None = None
    label: str | None = None

    @property
    def form(self) -> RowForm:
        return "scores" if self.score is not None else "labels" if self.label is not None else "pairs"

    def error(self, problem: str) -> BadRowError:
        return SourceRow(self.where, None).error(problem)


def read_text_rows(
    rows: Iterable[SourceRow], data: DataConfig, bad_rows: BadRows, form: RowForm | None = None
) -> list[TextRow]:
    """Reads rows in order. All must have the form `form`, or by default the form of the first row."""

    def parse(row: SourceRow) -> TextRow:
        nonlocal form
        found = _parsed(row, data)
        form = form or found.form
        if found.form != form:
            raise found.error(f"it has {FORMS[found.form]}, but the rows before it have {FORMS[form]}")
        return found

    return list(bad_rows.parsed(rows, parse))


def _parsed(row: SourceRow, data: DataConfig) -> TextRow:
    if not isinstance(row.readable_value(), dict):
        raise row.error(f"it is of type {type(row.value).__name__} instead of an object with texts")
    columns: dict[Any, Any] = row.value
    named = data.text_column is not None or data.text_pair_column is not None
    if not named and {"anchor", "positive"} & set(columns):
        anchor, positive, negative = PAIR_COLUMNS
        negatives = [_text(row, negative, text) for text in _negatives(row, columns.get(negative))]
        return TextRow(row.where, (_column_text(row, anchor), _column_text(row, positive), *negatives))
    first, second = _text_columns(row, data)
    if second is None:
        label = _label(row, data.label_column if data.label_column is not None else "label")
        return TextRow(row.where, (_column_text(row, first),), label=label)
    texts = _column_text(row, first), _column_text(row, second)
    score = _first_column(columns, SCORE_COLUMNS if data.label_column is None else (data.label_column,))
    if score is None and data.label_column is None and data.text_pair_column is not None:
        return TextRow(row.where, texts)  # the configuration names both columns, so the pair needs no score
    return TextRow(row.where, texts, score=_score(row, columns.get(score)))


def _text_columns(row: SourceRow, data: DataConfig) -> tuple[Any, Any]:
    """Returns the columns of the first and second text; None for the second if texts have labels instead."""
    columns = row.value
    for chosen in (data.text_column, data.text_pair_column):
        if chosen is not None and _first_column(columns, (chosen,)) is None:
            raise BadRowError(
                f"{row.where} has no column {chosen}, only {column_names(columns)}; set data.text_column and "
                "data.text_pair_column."
            )
    if data.text_column is not None or data.text_pair_column is not None:
        first = data.text_column if data.text_column is not None else "text"
        return _first_column(columns, (first,)) or first, _first_column(columns, (data.text_pair_column,))
    for first, second in TEXT_COLUMNS:
        if first in columns and second in columns:
            return first, second
    if "text" in columns:
        return "text", None
    raise BadRowError(
        f"{row.where} has the columns {column_names(columns)}; rows need anchor and positive, text1, text2 and score, "
        "or text and label, or set data.text_column, data.text_pair_column and data.label_column."
    )


def _first_column(columns: dict[Any, Any], names: Iterable[Any]) -> Any:
    """Returns the first column in `names` that exists, with its own spelling, or None."""
    spelled = (way for name in names if name is not None for way in (column_key(columns, name), str(name)))
    return next((name for name in spelled if name in columns), None)


def _column_text(row: SourceRow, column: Any) -> str:
    return _text(row, str(column), row.value.get(column))


def _text(row: SourceRow, name: str, text: Any) -> str:
    if text is None:
        raise row.error(f"it has no {name}")
    text = row.valid_text(text, name)
    if not text.strip():
        raise row.error(f"its {name} is empty")
    return str(text)


def _negatives(row: SourceRow, value: Any) -> list[Any]:
    if value is None or value == "":  # an empty cell of a .csv file
        return []
    return value if isinstance(value, list) else [value]


def _label(row: SourceRow, column: Any) -> str:
    key = _first_column(row.value, (column,))
    value = None if key is None else row.value[key]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise row.error(f"it has no {column}")
    if not isinstance(value, (str, int)):
        raise row.error(f"its {column} is {value!r} instead of a string or an integer")
    return row.valid_text(str(value).strip(), str(column))


def _score(row: SourceRow, value: Any) -> float:
    if value is None or value == "":
        raise row.error("it has no score")
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise row.error(f"its score is {value!r} instead of a finite number")
    return score


def require_embedding_columns(data: DataConfig) -> None:
    """Raises ConfigError if the first line of a table looks like data, because columns are found by name."""
    chosen = (data.text_column, data.text_pair_column, data.label_column)
    named = [column for column in chosen if column is not None]
    names = named or [*PAIR_COLUMNS, *SCORE_COLUMNS, *(name for pair in TEXT_COLUMNS for name in pair)]
    tables = [path for path in local_files(data, text_rows=True) if file_form(path) in TABLES]
    for path in tables if data.has_header else ():
        first = FirstLine.of(path, names)
        if first is not None and first.looks_like_data:
            raise first.refusal(
                "set data.text_column, data.text_pair_column and data.label_column to the numbers of their columns, or "
                "add a first line with names such as text1, text2 and score"
            )

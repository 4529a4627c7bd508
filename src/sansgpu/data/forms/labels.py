"""Labeled texts: a text or a pair of texts, with one label, several labels or a number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sansgpu.data.forms.form import Form, Forms, any_row, unused_columns
from sansgpu.data.rows import (
    LABEL_COLUMNS,
    TEXT_NAMES,
    BadRowError,
    Row,
    SourceRow,
    TypedRow,
    column_key,
    column_names,
    find_column,
    missing_column,
    row_text,
    text_column,
)
from sansgpu.data.tables import Columns, first_lines_of_data

PAIR_COLUMN = "text_pair"


@dataclass(frozen=True)
class LabeledText(TypedRow):
    """A text or a pair of texts. The label is a string, number or boolean, or a list of them; None means unknown."""

    text: str
    pair: str | None
    label: Any

    @property
    def labels(self) -> list[str]:
        """The names of the row's labels."""
        return [label_name(value) for value in (self.label if isinstance(self.label, list) else [self.label])]


def label_name(value: Any) -> str:
    """Returns the name of a label, which is the same for 1, 1.0 and "1"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def unlabeled_text(row: SourceRow, columns: Columns) -> LabeledText:
    """Reads a row for prediction, ignoring its label, if any. Raises BadRowError if it is invalid."""
    given = row.columns(LABELED.needed)
    column, pair = find_column(given, columns.text), _pair_column(given, columns)
    if columns.pair is not None and pair is None:
        raise row.error(f"it has no column {columns.pair}, only {column_names(given)}")
    label = find_column(given, columns.label, LABEL_COLUMNS)
    others = {key: value for key, value in given.items() if key != label}
    try:
        return _texts(row, others, column, pair)
    except BadRowError:
        if column is None and sum(isinstance(value, str) for value in others.values()) > 1 and "text" not in others:
            raise row.error(f"it has no column {columns.text or 'text'}, only {column_names(given)}") from None
        raise


def _labeled(row: SourceRow, columns: Columns) -> LabeledText:
    given: Row = row.value
    label = find_column(given, columns.label, LABEL_COLUMNS)
    if label is None:
        wanted = columns.label if columns.label is not None else " or ".join(LABEL_COLUMNS)
        raise missing_column(given, wanted, "data.label_column", row.where)
    pair = _pair_column(given, columns)
    if columns.pair is not None and pair is None:
        raise missing_column(given, columns.pair, "data.text_pair_column", row.where)
    value = given[label]
    for one in value if isinstance(value, list) else [value]:
        _require_label(row, one)
    column = None if columns.text is None else column_key(given, columns.text)
    read = _texts(row, {key: inner for key, inner in given.items() if key != label}, column, pair)
    return LabeledText(read.where, read.text, read.pair, value)


def _unused(row: Row, columns: Columns) -> Iterator[str]:
    label, pair = find_column(row, columns.label, LABEL_COLUMNS), _pair_column(row, columns)
    texts = {key: value for key, value in row.items() if key not in (label, pair)}
    return unused_columns(row, (label, pair, text_column(texts, columns.text)))


def _pair_column(given: Row, columns: Columns) -> Any:
    return find_column(given, columns.pair, (PAIR_COLUMN,))


def _has_pair(row: Row, columns: Columns) -> bool:
    return _pair_column(row, columns) is not None


def _texts(row: SourceRow, given: Row, column: Any, pair: Any) -> LabeledText:
    second = given.get(pair) if pair is not None else None
    text = row_text({key: value for key, value in given.items() if key != pair}, column, row.where)
    if pair is not None and (not isinstance(second, str) or not second.strip()):
        raise row.error(f"its {pair} is missing or empty")
    if not text.strip():
        raise row.error("its text is empty")
    second = None if second is None else row.valid_text(second, str(pair))
    return LabeledText(row.where, row.valid_text(text, "text"), second, None)


def _require_label(row: SourceRow, value: Any) -> None:
    """Raises BadRowError if a value cannot be a label."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise row.error("it has no label")
    if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise row.error(
            f"its label is {value!r}, but must be a string, a finite number, true, false, or a list of these"
        )
    if isinstance(value, str):
        row.valid_text(value, "label")


def number_columns(paths: Sequence[Path], columns: Columns) -> tuple[Columns, str | None]:
    """Returns the numbers of the text's and the label's column, with a message, if no table has a header."""
    names = (
        *(TEXT_NAMES if columns.text is None else (columns.text,)),
        *(LABEL_COLUMNS if columns.label is None else (columns.label,)),
        PAIR_COLUMN if columns.pair is None else columns.pair,
    )
    unnamed = first_lines_of_data(paths, columns, names)
    suspect = next((first for first in unnamed if first.looks_like_data), None)
    if suspect is None:
        return columns, None
    label = suspect.label_column
    agree = len(unnamed) == len(paths) and all(first.label_column == label for first in unnamed)
    if label is not None and agree and not columns.named:
        found = f"text = column {1 - label}, label = column {label}"
        note = f"{suspect.path}: its first line looks like data, so the file is read without a header: {found}"
        return Columns(text=1 - label, label=label), note
    numbers = (
        "set data.text_column and data.label_column to the numbers of their columns"
        if label is None
        else f"set data.text_column to {1 - label} and data.label_column to {label}"
    )
    raise suspect.refusal(f"{numbers} if no file has a header, or add a first line with the names of the columns")


LABELED = Forms("a text and a label", (
    Form(("text", "text_pair", "label"), _labeled,
         {"text": "A man sleeps.", "text_pair": "Nobody is awake.", "label": "entailment"},
         ("content", "labels"), _has_pair, unused=_unused),
    Form(("text", "label"), _labeled, {"text": "A great film.", "label": "good"}, ("content", "labels"), any_row,
         unused=_unused),
), text_rows=True, resolve=number_columns)  # fmt: skip

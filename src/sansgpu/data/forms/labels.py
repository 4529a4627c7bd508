"""Labeled texts: a text or a pair of texts, with one label, several labels or a number.

Several labels are a list, or one column of zeros and ones for each label.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sansgpu.data.formats.names import TEXT_SUFFIXES, file_form
from sansgpu.data.forms.form import Form, Forms, any_row, by_layout, unused_columns
from sansgpu.data.forms.label_columns import NO_FLAG, PAIR_COLUMN, flag, flag_columns, is_id_column, main_text
from sansgpu.data.forms.pairs import PAIR_COLUMNS
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
    with_nested,
)
from sansgpu.data.tables import Columns, first_lines_of_data

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)\.0+")  # as pandas writes whole numbers in a column with empty cells


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
    """Returns the name of a label, which is the same for 1, 1.0, "1" and "1.0", but keeps the zeros of "007"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    name = str(value).strip()
    return name.partition(".")[0] if _WHOLE_NUMBER.fullmatch(name) else name


def unlabeled_text(row: SourceRow, columns: Columns) -> LabeledText:
    """Reads a row for prediction, ignoring its label, if any. Raises BadRowError if it is invalid."""
    given = with_nested(row.columns(LABELED.needed), columns.nested)
    row = row._replace(value=given)
    roles = _roles(given, columns)
    text, pair = roles.text, roles.pair
    if columns.pair is not None and pair is None:
        raise row.error(f"it has no column {columns.pair}, only {column_names(given)}")
    others = roles.without_labels(given)
    column = text if columns.text is None else find_column(given, columns.text)
    try:
        return _texts(row, roles._replace(text=column))
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
    value = given[label]
    for one in value if isinstance(value, list) else [value]:
        _require_label(row, one)
    return _with_label(row, columns, value)


def _labeled_by_columns(row: SourceRow, columns: Columns) -> LabeledText:
    """Reads a row with one column of zeros and ones for each label."""
    given: Row = row.value
    labels = list[str]()
    for name in _label_columns(given, columns):
        if name not in given:
            raise missing_column(given, name, "data.label_column", row.where)
        value = given[name]
        if value in NO_FLAG:
            raise row.error(f"it has no label, because its {name} is {'empty' if value in ('', None) else value}")
        if (chosen := flag(value)) is None:
            raise row.error(f"its {name} is {value!r} instead of 0 or 1")
        labels += [name] if chosen else []
    return _with_label(row, columns, labels)


def _with_label(row: SourceRow, columns: Columns, label: Any) -> LabeledText:
    roles = _roles(row.value, columns)
    if columns.text is None and roles.text is not None and is_id_column(roles.text):
        raise BadRowError(
            f"{row.where} has the columns {column_names(row.value)}, of which none looks like a text; set "
            "data.text_column to the column with the text."
        )
    if columns.pair is not None and roles.pair is None:
        raise missing_column(row.value, columns.pair, "data.text_pair_column", row.where)
    read = _texts(row, roles)
    return LabeledText(read.where, read.text, read.pair, label)


class _Roles(NamedTuple):
    """The keys of a row's columns. `text` and `pair` are None if they are unclear or do not exist."""

    labels: frozenset[Any]
    text: Any
    pair: Any  # the second text

    def without_labels(self, row: Row) -> Row:
        return {name: value for name, value in row.items() if name not in self.labels}


def _roles(row: Row, columns: Columns) -> _Roles:
    return _roles_of_layout(row, (columns, _label_columns(row, columns)))


@by_layout
def _roles_of_layout(row: Row, settings: tuple[Columns, tuple[str, ...]]) -> _Roles:
    columns, label_columns = settings
    labels = frozenset((find_column(row, columns.label, LABEL_COLUMNS), *label_columns))
    return _Roles(labels, *_text_columns(row, columns, labels))


def _label_columns(row: Row, columns: Columns) -> tuple[str, ...]:
    if columns.labels or columns.label is not None or find_column(row, None, LABEL_COLUMNS) is not None:
        return columns.labels
    return flag_columns(iter((row,)))


def _has_label_columns(row: Row, columns: Columns) -> bool:
    return bool(_label_columns(row, columns))


def _unused(row: Row, columns: Columns) -> Iterator[str]:
    roles = _roles(row, columns)
    return unused_columns(row, (*roles.labels, roles.text, roles.pair), columns)


def _text_columns(row: Row, columns: Columns, labels: frozenset[Any]) -> tuple[Any, Any]:
    """Returns the keys of the text and of the second text, which are None if they are unclear or do not exist."""
    pair = find_column(row, columns.pair, (PAIR_COLUMN,))
    if pair is None and columns.text is None and columns.pair is None and "text" not in row:
        usual = next((pair for pair in PAIR_COLUMNS if all(isinstance(row.get(name), str) for name in pair)), None)
        if usual is not None:
            return usual
    if columns.text is not None:
        return column_key(row, columns.text), pair
    others = {name: value for name, value in row.items() if name not in labels and name != pair}
    return main_text(others), pair


def _has_pair(row: Row, columns: Columns) -> bool:
    return not columns.labels and _roles(row, columns).pair is not None


def _texts(row: SourceRow, roles: _Roles) -> LabeledText:
    given, column, pair = row.value, roles.text, roles.pair
    second = given.get(pair) if pair is not None and pair not in roles.labels else None
    if column not in given or column == pair or column in roles.labels:  # a message names the columns that may be it
        given = {key: value for key, value in roles.without_labels(given).items() if key != pair}
    text = row_text(given, column, row.where)
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
        *(columns.labels or (LABEL_COLUMNS if columns.label is None else (columns.label,))),
        PAIR_COLUMN if columns.pair is None else columns.pair,
    )
    unnamed = first_lines_of_data(paths, columns, names)
    suspect = next((first for first in unnamed if first.looks_like_data), None)
    if suspect is None:
        return columns, None
    label = suspect.label_column
    with_rows = [path for path in paths if file_form(path) not in TEXT_SUFFIXES]
    agree = len(unnamed) == len(with_rows) and all(first.label_column == label for first in unnamed)
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
    Form(("text", "toxic", "threat"), _labeled_by_columns, {"text": "You are kind.", "toxic": 0, "threat": 0},
         ("content", "text_pair"), _has_label_columns, unused=_unused),
    Form(("text", "text_pair", "label"), _labeled,
         {"text": "A man sleeps.", "text_pair": "Nobody is awake.", "label": "entailment"},
         ("content", "labels", *(name for pair in PAIR_COLUMNS for name in pair)), _has_pair, unused=_unused),
    Form(("text", "label"), _labeled, {"text": "A great film.", "label": "good"}, ("content", "labels"), any_row,
         unused=_unused),
), text_rows=True, resolve=number_columns)  # fmt: skip

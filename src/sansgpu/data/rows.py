"""Rows of datasets, and checks of their values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.wording import truncate

ClassNames = dict[str, list[str]]  # column -> its class names, in the order of their ids


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """Returns the class names of each ClassLabel column, or list of ClassLabel, from a `Features.to_dict()`."""
    found = {column: _names(feature) for column, feature in features.items()}
    return {column: names for column, names in found.items() if names}


def parquet_class_names(metadata: Mapping[bytes, bytes] | None) -> ClassNames:
    """Returns the class names that `datasets` stored in a Parquet file's metadata; other files have none."""
    try:
        return class_names(json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def with_names(row: Mapping[str, Any], names: ClassNames) -> dict[str, Any]:
    """Returns a row with class names instead of class ids. An id of -1, which means "no label", becomes None."""
    if not names:
        return dict(row)
    named = {column: _by_name(row[column], own) for column, own in names.items() if column in row}
    return {**row, **named}


def _names(feature: Any) -> list[str]:
    inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
    return [str(name) for name in inner.get("names") or ()] if inner.get("_type") == "ClassLabel" else []


def _by_name(value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [_by_name(label, names) for label in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


MAX_PROBLEM_CHARACTERS = 400  # longest message about a row, which may quote a long value
TEXT_NAMES = ("text", "content")  # text columns to try, in this order, if data.text_column is not set
CHAT_NAMES = (  # usual names of columns with prompts and answers
    *("prompt", "completion", "response", "instruction", "input", "context", "output", "question", "answer", "query"),
    *("problem", "solution", "inputs", "targets", "system", "system_prompt", "system_message", "chosen", "rejected"),
)
LABEL_COLUMNS = ("label", "labels")  # label columns to try, in this order, if data.label_column is not set

Row = dict[Any, Any]
Column = str | int  # the name of a column, or its number in a table without a header

ROW_REMEDY = "; fix or remove the row."  # ends the message about an invalid row


class BadRowError(ConfigError):
    """Raised for an invalid row. The message starts with the row's location."""


class LeftOutError(BadRowError):
    """Raised for a valid row that its own values leave out, such as one that an annotator rejected."""

    def __init__(self, where: str, reason: str) -> None:
        """`reason` follows the word "row" in messages."""
        super().__init__(f"{where} is a row {reason}, which is left out.")
        self.reason = reason


def bad_row(where: str, problem: str) -> BadRowError:
    """Returns the error for an invalid row."""
    return BadRowError(f"{where} {truncate(problem, MAX_PROBLEM_CHARACTERS)}{ROW_REMEDY}")


class SourceRow(NamedTuple):
    """One row of a file or dataset, or the error message `problem` if it cannot be read."""

    where: str
    value: Any
    problem: str | None = None

    def readable_value(self) -> Any:
        """Returns the value. Raises BadRowError if it cannot be read."""
        if self.problem:
            raise BadRowError(self.problem)
        return self.value

    def columns(self, needed: str) -> Row:
        """Returns the columns. Raises BadRowError if the value is not an object, which must have what is `needed`."""
        value = self.readable_value()
        if not isinstance(value, dict):
            raise self.error(f"it is of type {type(value).__name__} instead of an object with {needed}")
        return value

    def error(self, problem: str) -> BadRowError:
        """Returns the error for an invalid value."""
        return bad_row(f"{self.where}:", problem)

    def required_text(self, key: str) -> str:
        """Returns the text of a column. Raises BadRowError if it is missing or has only white space."""
        text = self.value.get(key)
        if not isinstance(text, str) or not text.strip():
            raise self.error(f"it has no {key}")
        return self.valid_text(text, key)

    def identifier(self, values: Mapping[Any, Any], key: str = "id") -> str | None:
        """Returns the id in `values`, or None if there is none. Raises BadRowError if it is no string or integer."""
        value = values.get(key)
        if value is None or value == "":  # an empty cell of a table
            return None
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not is_text(str(value)):
            raise self.error(f"its {key} is {value!r} instead of a string or an integer")
        return str(value)

    def valid_text(self, text: Any, key: str) -> str:
        """Returns `text`, the row's value for `key`. Raises BadRowError if it is not a string of valid Unicode."""
        if not isinstance(text, str):
            raise self.error(f"its {key} contains {text!r}, which is not text")
        if not is_text(text):
            raise self.error(f"its {key} contains an unpaired surrogate, which is not valid text")
        return text


@dataclass(frozen=True, eq=False)
class TypedRow:
    """The content of a row, as the `Form` of the row reads it."""

    where: str  # location of the row, for messages

    def error(self, problem: str) -> BadRowError:
        return bad_row(f"{self.where}:", problem)


class LocatedRow(dict[Any, Any]):
    """A row as a dict, with its location `where`: file and line, for example."""

    def __init__(self, row: SourceRow) -> None:
        super().__init__(row.value)
        self.where = row.where


def located(rows: Iterable[Mapping[Any, Any]]) -> Iterator[SourceRow]:
    """Yields rows with their location, or their number if they have none."""
    for number, row in enumerate(rows, 1):
        yield SourceRow(row.where if isinstance(row, LocatedRow) else f"row {number}", row)


def is_text(text: str) -> bool:
    """Returns whether a string can be encoded as UTF-8. Unpaired surrogates, e.g. from JSON escapes, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def column_names(row: Mapping[Any, Any]) -> str:
    """Lists the names of a row's columns for a message."""
    return truncate(", ".join(map(str, row)))


def column_key(row: Mapping[Any, Any], column: str | int) -> Column:
    """Resolves a negative column number, which counts from the end. Returns other columns unchanged."""
    if isinstance(column, int) and column < 0 and column not in row and len(row) + column in row:
        return len(row) + column
    return column


def find_column(row: Mapping[Any, Any], chosen: Column | None, usual: Iterable[Column] = ()) -> Any:
    """Returns the key of the `chosen` column or, if that is None, of the first `usual` column that exists, or None.

    If no usual name exists exactly, one in other case counts, such as `Label`.
    """
    names = (*usual,) if chosen is None else (column_key(row, chosen), str(chosen))
    for name in names:
        if name in row:
            return name
    if chosen is not None:
        return None
    folded = {str(name).strip().casefold(): name for name in reversed([*row])}
    return next((folded[name] for name in names if name in folded), None)


def with_nested(row: Row, names: Iterable[str]) -> Row:
    """Returns a row in which columns with names such as `review.body` exist: the keys of the objects that hold them.

    A column of the row that has such a name itself is taken as it is.
    """
    for name in names:
        while name not in row and (outer := _outer_column(row, name)) is not None:
            others = {key: value for key, value in row.items() if key != outer}
            row = others | {f"{outer}.{key}": value for key, value in row[outer].items()}
    return row


def _outer_column(row: Row, name: str) -> str | None:
    """Returns the column with an object that may hold a column named `name`, or None."""
    objects = (key for key, value in row.items() if isinstance(key, str) and isinstance(value, dict) and value)
    return next((key for key in objects if name.startswith(f"{key}.")), None)


def missing_column(row: Mapping[Any, Any], column: Column, key: str, where: str) -> BadRowError:
    """Returns the error for a row without a column, which config key `key` selects."""
    return BadRowError(f"{where} has no column {truncate(str(column))}, only {column_names(row)}; set {key}.")


def row_value(row: Mapping[Any, Any], column: Column, key: str, where: str) -> Any:
    """Returns the value of a column, which config key `key` selects. Raises BadRowError if it does not exist."""
    if column_key(row, column) not in row:
        raise missing_column(row, column, key, where)
    return row[column_key(row, column)]


def is_conversation(row: Mapping[Any, Any]) -> bool:
    """Returns whether a row has columns of a conversation or a prompt and its completion, but no text column."""
    turns = any(isinstance(row.get(name), (list, tuple)) for name in ("messages", "conversations", "conversation"))
    answer = any(name in row for name in ("completion", "output")) and len(_string_columns(row)) != 1
    return not _text_columns(row) and (turns or answer)


def _text_columns(row: Mapping[Any, Any]) -> list[Any]:
    found = [name for name in TEXT_NAMES if name in row]
    others = (name for name, value in row.items() if isinstance(name, str) and isinstance(value, str | None))
    return found or [name for name in others if name.strip().casefold() == TEXT_NAMES[0]][:1]  # such as `Text`


def _string_columns(row: Mapping[Any, Any]) -> list[Any]:
    return [name for name, value in row.items() if isinstance(value, str)]


def text_of(row: SourceRow, column: Column | None) -> str:
    """Returns the text of a row, which is a string or has columns. Raises BadRowError if it has no valid text."""
    value = row.readable_value()
    if not isinstance(value, (str, dict)):
        raise bad_row(row.where, f"is of type {type(value).__name__} instead of an object with a text column")
    text = value if isinstance(value, str) else row_text(value, column, row.where)
    if not is_text(text):
        raise bad_row(row.where, "contains an unpaired surrogate, which is not valid text")
    return text


def text_column(row: Row, column: Column | None) -> Any:
    """Returns the key of the column with the text: `column`, or by default `text`, `content` or the only string column.

    Returns None if there is no such column.
    """
    if column is not None:
        return find_column(row, column)
    found = _text_columns(row) or _string_columns(row)
    return found[0] if len(found) == 1 or _text_columns(row) else None


def row_text(row: Row, column: Column | None, where: str) -> str:
    """Returns the text of a row from its `text_column`. Raises BadRowError if it has none."""
    row = with_nested(row, (column,)) if isinstance(column, str) and "." in column else row
    if column is None:
        found = _text_columns(row) or _string_columns(row)
        advice = None
        if is_conversation(row):
            advice = "these are conversations, not documents; fine-tune on them with task sft, and evaluate that run"
        elif not _text_columns(row) and len(found) != 1:
            advice = "set data.text_column to the column with the text"
        if advice is not None:
            raise BadRowError(f"{where} has the columns {column_names(row)}; {advice}.")
        column = found[0]
    text = row_value(row, column, "data.text_column", where)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise BadRowError(
            f"{where}: column {column} contains a value of type {type(text).__name__} instead of text; set "
            "data.text_column."
        )
    return text

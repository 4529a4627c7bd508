"""Finds the columns of labeled texts: the text, and the label or one column of zeros and ones for each label."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.wording import truncate
from sansgpu.data.rows import LABEL_COLUMNS, Row, SourceRow, column_names, find_column, text_column
from sansgpu.data.tables import Columns

OTHER_LABEL_COLUMNS = ("category", "class", "intent", "sentiment", "emotion", "topic", "target")
ID_WORDS = ("", "id", "ids", "idx", "index", "uuid", "guid")  # last words of the names of columns that identify rows
PATTERN = re.compile(r"[*?\[]")
MAX_ROWS_WITHOUT_LABEL = 1000  # rows without any possible label column that are read before the search ends
NO_FLAG = (None, "", -1, "-1")  # values of a 0/1 column in a row without a label
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


def flag(value: Any) -> bool | None:
    """Returns the value of a 0/1 column, which may be text; None if it has neither value."""
    if isinstance(value, (bool, int, float)):
        return bool(value) if value in (0, 1) else None
    return FLAGS.get(value.strip().casefold()) if isinstance(value, str) else None


def is_id_column(name: Any) -> bool:
    """Returns whether a column identifies rows, such as `id`, `user_id` or the index that pandas writes."""
    words = re.split(r"[\s_:.-]+", str(name).casefold())
    return words[-1] in ID_WORDS or words[0] == "unnamed"


def main_text(row: Row) -> Any:
    """Returns the key of the column with the text of a row without its label, or None if that is unclear.

    It is the usual one, the only one with text that does not identify rows, or the only one with "text" in its name,
    such as comment_text.
    """
    if (found := text_column(row, None)) is not None:
        return found
    strings = [name for name, value in row.items() if isinstance(value, str) and not is_id_column(name)]
    named = [name for name in strings if "text" in re.split(r"[\s_-]+", str(name).casefold())]
    return next((names[0] for names in (strings, named) if len(names) == 1), None)


def flag_columns(rows: Iterator[Row]) -> tuple[str, ...]:
    """Returns the columns with a 0 or 1 in every row, if there are several.

    Columns with true or false count only if no column has digits, because datasets describe rows with them. Returns
    nothing if a row has a column with a usual name for the label.
    """
    possible: dict[str, set[bool]] | None = None  # for each column, whether its values are digits
    usual: str | None = None
    for number, row in enumerate(rows):
        if find_column(row, None, LABEL_COLUMNS) is not None:
            return ()
        if possible is None:
            possible = {name: set() for name in row if isinstance(name, str) and not is_id_column(name)}
            usual = _usual_label(row)
        for name in [*possible]:
            value = row.get(name)
            if value in NO_FLAG:
                continue
            if flag(value) is None:
                del possible[name]
            else:
                possible[name].add(not (isinstance(value, bool) or str(value).strip().isalpha()))
        if not possible and number >= MAX_ROWS_WITHOUT_LABEL:
            break
    found = [tuple(n for n, kinds in (possible or {}).items() if kinds == {digits}) for digits in (True, False)]
    names = next((names for names in found if len(names) > 1), ())
    return names if usual is None or usual in names else ()


def _usual_label(row: Row) -> str | None:
    """Returns the only column with one of `OTHER_LABEL_COLUMNS` as its name, or None."""
    found = [name for name in row if str(name).strip().casefold() in OTHER_LABEL_COLUMNS]
    return found[0] if len(found) == 1 else None


def find_label_columns(
    rows: Callable[[], Iterator[SourceRow]], columns: Columns, source: str
) -> tuple[Columns, str | None]:
    """Finds the columns of the labels of dataset `source` if they are unusual or set by a pattern such as `toxic_*`.

    Returns the columns, and a message about them or None. Raises ConfigError if a pattern matches no column.
    """

    def readable() -> Iterator[Row]:
        return (row.value for row in rows() if row.problem is None and isinstance(row.value, dict))

    first: Row | None = next(readable(), None)
    if first is None:
        return columns, None
    patterns = columns.labels or ((columns.label,) if isinstance(columns.label, str) else ())
    if patterns:
        if columns.label in first or not any(PATTERN.search(pattern) for pattern in patterns):
            return columns, None
        labels = _matching(first, patterns, source)
        return replace(columns, label=None, labels=labels), f"{source}: the labels are the columns {_listed(labels)}"
    if columns.label is not None or find_column(first, None, LABEL_COLUMNS) is not None:
        return columns, None
    labels = flag_columns(readable())
    others = {name: value for name, value in first.items() if name not in labels}
    if labels and (columns.text is not None or main_text(others) is not None):
        return replace(columns, labels=labels), (
            f"{source}: the columns {_listed(labels)} have only 0 and 1, so each is a label; set data.label_column to "
            "choose others"
        )
    usual = _usual_label(first)
    has_label = any(name in row for row in islice(readable(), MAX_ROWS_WITHOUT_LABEL) for name in LABEL_COLUMNS)
    if usual is None or has_label:
        return columns, None
    return replace(columns, label=usual), f"{source}: label = column {usual} (data.label_column)"


def _matching(row: Row, patterns: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the columns that match the names or patterns, in the order of the row."""
    for pattern in patterns:
        if not any(name == pattern or fnmatchcase(str(name), pattern) for name in row):
            raise ConfigError(
                f"{source} has no column {truncate(pattern)}, only {column_names(row)}; set data.label_column."
            )
    return tuple(str(n) for n in row if any(n == pattern or fnmatchcase(str(n), pattern) for pattern in patterns))


def _listed(names: Sequence[str]) -> str:
    return truncate(", ".join(names))

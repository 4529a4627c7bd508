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
from sansgpu.data.forms.cells import finite_number
from sansgpu.data.forms.form import is_empty
from sansgpu.data.rows import LABEL_COLUMNS, Column, Row, SourceRow, column_names, find_column, text_column
from sansgpu.data.tables import Columns

PAIR_COLUMN = "text_pair"
OTHER_LABEL_COLUMNS = ("category", "class", "intent", "sentiment", "emotion", "topic", "target")
# Words in the names of columns that describe where a text comes from or how long it is. They are no labels unless a
# table has no other column beside the text.
METADATA_WORDS = frozenset((
    "source", "dataset", "subset", "split", "domain", "url", "file", "filename", "path", "license", "author", "date",
    "time", "timestamp", "created", "year", "lang", "language", "count", "length", "len", "size", "tokens", "words",
    "chars", "page", "line", "row", "number", "nr", "no", "position", "version", "dump", "meta", "metadata",
))  # fmt: skip
SCORE_WORDS = frozenset(("score", "rating", "stars", "grade"))  # in names of columns with numbers to predict
COMPARED_ROWS = 1000  # rows whose values show which columns have labels
MIN_REPEATS = 2  # rows per distinct value, on average, of a column with classes
MAX_LABEL_CHARACTERS = 60
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

    It is the usual one, the only one with text that does not identify rows, the only one with "text" in its name,
    such as comment_text, or the only one whose name is not that of metadata, such as `no`.
    """
    if (found := text_column(row, None)) is not None:
        return found
    strings = [name for name, value in row.items() if isinstance(value, str) and not is_id_column(name)]
    named = [name for name in strings if "text" in re.split(r"[\s_-]+", str(name).casefold())]
    others = [name for name in strings if not _words(name) & METADATA_WORDS]
    return next((names[0] for names in (strings, named, others) if len(names) == 1), None)


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
    found = [name for name in row if _is_usual(name)]
    return found[0] if len(found) == 1 else None


def _is_usual(name: Any) -> bool:
    return str(name).strip().casefold() in OTHER_LABEL_COLUMNS


def find_label_columns(
    rows: Callable[[], Iterator[SourceRow]], columns: Columns, source: str, is_guess: bool = False
) -> tuple[Columns, str | None]:
    """Finds the columns of the labels of dataset `source` if they are unusual or set by a pattern such as `toxic_*`.

    With `is_guess`, the user has not said that the rows have labels, so columns count only if their values look like
    labels. Returns the columns, and a message about them or None. Raises ConfigError if a pattern matches no column.
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
    compared = [*islice(readable(), COMPARED_ROWS)]
    if any(name in row for row in compared for name in LABEL_COLUMNS):
        return columns, None
    label = _only_label(compared, columns, is_guess)
    if label is None:
        return columns, None
    return replace(columns, label=label), f"{source}: label = column {label} (data.label_column)"


def _only_label(rows: Sequence[Row], columns: Columns, is_guess: bool) -> Column | None:
    """Returns the column of the label of rows whose text is clear, or None if it is unclear.

    It is the one with a usual name, the only one with values like labels, or the only one beside the text.
    """
    usual, found = _usual_label(rows[0]), label_like_columns(rows)
    if is_guess:
        names = [usual] if usual in found else found
    else:
        names = [usual] if usual is not None else found if len(found) == 1 else _columns_beside_text(rows, columns)
    if len(names) != 1 or names[0] in (columns.text, columns.pair):
        return None
    others = {name: value for name, value in rows[0].items() if name != names[0]}
    is_clear = not is_guess or columns.text is not None or main_text(others) is not None
    return names[0] if is_clear else None


def _columns_beside_text(rows: Sequence[Row], columns: Columns) -> list[Any]:
    """Returns the columns beside the text, the second text and ids; none if it is unclear which one has the text."""
    text = main_text(rows[0]) if columns.text is None else find_column(rows[0], columns.text)
    texts = text, find_column(rows[0], columns.pair, (PAIR_COLUMN,))
    beside = [name for name in _filled_columns(rows) if name not in texts and not is_id_column(name)]
    return [] if text is None else beside


def _filled_columns(rows: Sequence[Row]) -> list[Any]:
    """Returns the columns that have a value in any row, in their order."""
    return [*dict.fromkeys(name for row in rows for name, value in row.items() if not is_empty(value))]


def label_like_columns(rows: Sequence[Row]) -> list[Any]:
    """Returns the columns with few short values that repeat, or with numbers to predict.

    The first rows may all have the same label, but then the column needs a usual name.
    """
    named = (name for name in _filled_columns(rows) if not is_id_column(name) and not _words(name) & METADATA_WORDS)
    return [name for name in named if _are_labels(name, rows, 2 - _is_usual(name))]


def _words(name: Any) -> frozenset[str]:
    return frozenset(re.split(r"[\s_:.-]+", str(name).casefold()))


def _are_labels(name: Any, rows: Sequence[Row], least: int = 1) -> bool:
    """Returns whether the values of a column may be labels, at least two of which `least` are different."""
    values = [row[name] for row in rows if not is_empty(row.get(name))]
    if len(values) < 2:
        return False
    numbers = [finite_number(value) for value in values]
    if None not in numbers and (_words(name) & SCORE_WORDS or any(number % 1 for number in numbers if number)):
        return True
    lists = [value if isinstance(value, list) else [value] for value in values]
    labels = {str(one) if isinstance(one, (str, int, float)) else "" for given in lists for one in given}
    are_short = all(0 < len(label) <= MAX_LABEL_CHARACTERS for label in labels)
    return are_short and least <= len(labels) <= len(values) / MIN_REPEATS


def propose_label_columns(rows: Sequence[Row]) -> tuple[Column | None, Column] | None:
    """Returns columns to set for rows that may be labeled texts, although this is not certain; None without such.

    They are the one with the text, which is None if it needs no setting, and the one with the label.
    """
    if not rows:
        return None
    usual, found = _usual_label(rows[0]), label_like_columns(rows) or _columns_beside_text(rows, Columns())
    labels: list[Any] = [usual] if usual in found else found
    if len(labels) != 1 or not _are_labels(labels[0], rows):
        return None
    others = {name: value for name, value in rows[0].items() if name != labels[0]}
    if main_text(others) is not None:
        return None, labels[0]
    texts = [name for name, value in others.items() if isinstance(value, str) and not is_id_column(name)]
    lengths = {name: sum(len(str(row.get(name) or "")) for row in rows) for name in texts}
    return (max(texts, key=lambda name: lengths[name]), labels[0]) if texts else None


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

"""Recognizes and reads rows. A `Form` is one set of columns; `Forms` are those that a task accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, Generic, TypeVar

from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import Column, Row, SourceRow, column_key, column_names, with_nested
from sansgpu.data.sources import local_files
from sansgpu.data.tables import Columns, Data, require_no_header

T_co = TypeVar("T_co", covariant=True)
_Settings = TypeVar("_Settings", bound=Hashable)
_T = TypeVar("_T")
MAX_LAYOUTS = 256  # different sets of columns to remember
MAX_COLUMNS = 1000  # rows with more columns are decided one by one, which bounds the memory
USUAL = Columns()  # no column is configured, so all have their usual names


@dataclass(frozen=True)
class Form(Generic[T_co]):
    """A set of columns that rows may have, and the function that reads such rows."""

    keys: tuple[str, ...]  # usual names of the columns that a row of this form has
    read: Callable[[SourceRow, Columns], T_co]  # raises BadRowError
    example: Mapping[str, Any]
    optional: tuple[str, ...] = ()  # further columns that it uses
    recognizes: Callable[[Row, Columns], bool] | None = None  # default: the row has values for all keys
    split: Callable[[SourceRow], Iterator[SourceRow]] | None = None  # yields the single rows that such a row holds
    # Names what a row has but `read` does not use, such as keys of its turns. Default: all columns but those that are
    # named here or configured.
    unused: Callable[[Row, Columns], Iterable[str]] | None = None

    @property
    def name(self) -> str:
        """The form in words: its columns."""
        return " + ".join(self.keys)

    def fits(self, row: Row, columns: Columns) -> bool:
        """Returns whether a row has this form. `columns` are the configured ones, whose names may be unusual."""
        if self.recognizes is not None:
            return self.recognizes(row, columns)
        return all(row.get(key) is not None for key in self.keys)

    def unused_parts(self, row: Row, columns: Columns) -> Iterator[str]:
        """Names the parts of a row that have a value but that `read` does not use."""
        if self.unused is not None:
            yield from self.unused(row, columns)
        else:
            yield from unused_columns(row, (*self.keys, *self.optional), columns)


def unused_columns(row: Row, used: Iterable[Column], columns: Columns = USUAL) -> Iterator[str]:
    """Names the columns of a row that have a value but are neither `used` nor configured."""
    known = {*used, *(column_key(row, column) for column in columns.named)}
    return (str(name) for name, value in row.items() if name not in known and not is_empty(value))


def is_empty(value: Any) -> bool:
    """Returns whether a column has no value, as a cell of a table or a key that other rows of the file have."""
    return not value if isinstance(value, (str, list, dict)) else is_missing(value)


def is_missing(value: Any) -> bool:
    """Returns whether a value is null, or NaN or Infinity, which are no value either."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def by_layout(decide: Callable[[Row, _Settings], _T]) -> Callable[[Row, _Settings], _T]:
    """Decorates a function whose result depends only on the settings, the row's column names and its values' types.

    The result is remembered, because nearly all rows of a file have the same columns.
    """
    known: dict[Any, _T] = {}

    @wraps(decide)
    def remembered(row: Row, settings: _Settings) -> _T:
        if len(row) > MAX_COLUMNS:
            return decide(row, settings)
        layout = settings, tuple(row), tuple(map(type, row.values()))
        try:
            return known[layout]
        except KeyError:
            found = decide(row, settings)
        if len(known) >= MAX_LAYOUTS:
            known.clear()
        known[layout] = found
        return found

    return remembered


def any_row(row: Row, columns: Columns) -> bool:
    """Recognizes any row. The last of several forms uses it if its reader tells the user best what a row lacks."""
    return True


@dataclass(frozen=True)
class Forms(Generic[T_co]):
    """The alternative forms of the rows of a task, in the order in which they are tried."""

    needed: str  # the columns that rows need, in words for messages
    forms: tuple[Form[T_co], ...]
    text_rows: bool = False  # each line of a plain text file, or each file in a folder of a label, is a row, too
    # Returns the columns of a row that is a list, such as one of turns, or None if it has no meaning.
    list_row: Callable[[list[Any]], Row | None] | None = None
    # Finds the columns of tables without a header, and returns a message about them or None. Raises ConfigError if the
    # meaning of the columns is unclear.
    resolve: Callable[[Sequence[Path], Columns], tuple[Columns, str | None]] | None = None
    # Joins rows that are one example together, such as the words of a sentence, and takes apart those without columns.
    regroup: Callable[[Iterable[SourceRow]], Iterator[SourceRow]] | None = None
    other_names: tuple[str, ...] = ()  # further columns that the readers look up

    def read(self, row: SourceRow, columns: Columns = USUAL, report: RowReport | None = None) -> T_co:
        """Returns the content of a row, and counts in `report` what is not used of it.

        Raises BadRowError if the row has none of the forms or is invalid.
        """
        return self.read_with_form(row, columns, report)[1]

    def read_with_form(
        self, row: SourceRow, columns: Columns = USUAL, report: RowReport | None = None
    ) -> tuple[Form[T_co], T_co]:
        """Returns the form of a row, and its content as `read` does."""
        row = self._with_usual_names(self._with_columns(row), columns)
        given = row.columns(self.needed)
        form = self.form_of(given, columns)
        if form is None:
            names = column_names({name: value for name, value in given.items() if not is_missing(value)})
            raise row.error(f"it has {names or 'no columns'}, but needs {self.needed}")
        content = form.read(row, columns)
        if report is not None:
            report.not_used(form.unused_parts(given, columns))
        return form, content

    def form_of(self, value: Any, columns: Columns = USUAL) -> Form[T_co] | None:
        """Returns the form that reads the value of a row, or None if there is none or the value has no columns."""
        given = self.with_usual_names(value, columns)
        if isinstance(given, dict):
            for form in self.forms:
                if form.fits(given, columns):
                    return form
        return None

    def with_usual_names(self, value: Any, columns: Columns = USUAL) -> Any:
        """Returns the value of a row with the names of columns that the forms read."""
        return self._with_usual_names(self._with_columns(SourceRow("", value)), columns).value

    def _with_columns(self, row: SourceRow) -> SourceRow:
        """Returns a row that is a list as one with columns, if that has a meaning."""
        if self.list_row is None or not isinstance(row.value, list):
            return row
        named = self.list_row(row.value)
        return row if named is None else row._replace(value=named)

    @cached_property
    def _usual_names(self) -> frozenset[str]:
        names = (name for form in self.forms for name in (*form.keys, *form.optional))
        return frozenset(name for name in (*names, *self.other_names) if name == name.casefold())

    def _with_usual_names(self, row: SourceRow, columns: Columns = USUAL) -> SourceRow:
        """Returns a row whose columns have the usual name instead of one in other case, and with the nested ones."""
        value = row.value
        if not isinstance(value, dict) or len(value) > MAX_COLUMNS:
            return row
        if columns.nested:
            value = with_nested(value, columns.nested)
            row = row._replace(value=value)
        if not (renamed := self._renamed(tuple(value), columns)):
            return row
        return row._replace(value={renamed.get(name, name): cell for name, cell in value.items()})

    @cached_property
    def _renamed(self) -> Callable[[tuple[Any, ...], Columns], dict[str, str]]:
        """Returns the usual names of columns; the function remembers them, because rows have the same columns."""
        usual_names = self._usual_names

        @lru_cache(maxsize=MAX_LAYOUTS)
        def renamed(names: tuple[Any, ...], columns: Columns) -> dict[str, str]:
            folded = {name: name.strip().casefold() for name in names if isinstance(name, str)}
            found = {
                name: usual
                for name, usual in folded.items()
                if usual != name and usual in usual_names and usual not in names and name not in columns.all_named
            }
            return found if len({*found.values()}) == len(found) else {}

        return renamed

    def single_rows(self, rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """Yields the rows of an example each: single rows of those that hold several, and rows that `regroup` joins."""
        nested = [form for form in self.forms if form.split is not None]
        for row in rows if self.regroup is None else self.regroup(rows):
            row = self._with_columns(row)
            split = None
            if nested and row.problem is None and isinstance(row.value, dict):
                named = self._with_usual_names(row)
                split = next((form.split for form in nested if form.fits(named.value, USUAL)), None)
            yield from (row,) if split is None else split(named)

    def read_all(self, rows: Iterable[SourceRow], report: RowReport, columns: Columns = USUAL) -> list[T_co]:
        """Returns the contents of all rows that are valid, in order."""
        return list(report.parsed(rows, lambda row: self.read(row, columns, report)))


def resolve_columns(data: Data, forms: Forms[Any]) -> tuple[Data, str | None]:
    """Sets the columns of local tables without a header by number.

    Returns the settings, and a message about the columns or None. Raises ConfigError if a first line looks like data
    but the columns are unclear, or if it is a header although columns are set by number.
    """
    columns, paths = Columns.of(data), local_files(data, forms.text_rows)
    require_no_header(paths, columns)
    resolved, note = (columns, None) if forms.resolve is None else forms.resolve(paths, columns)
    return data if resolved == columns else resolved.set_in(data), note

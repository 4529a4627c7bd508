"""Reads .csv and .tsv files, and detects those without a header, whose first line would be read as column names.

The first line is a header if it contains a column name that the form of the rows looks for. Otherwise it is data if two
signs agree: its label, tag or relation occurs in another line, too, and another value cannot be a column name. If the
signs disagree, an error names the settings to use.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO, TypeVar

from sansgpu.config import ConfigError
from sansgpu.config.schema import DataConfig
from sansgpu.data.lines import (
    MAX_LINE,
    binary_file,
    open_bytes,
    open_text,
    read_lines,
    reading_file,
    require_length,
    suffix_of,
)
from sansgpu.data.rows import LABEL_COLUMNS, ROW_REMEDY, TEXT_NAMES, Column, Row, SourceRow, find_column
from sansgpu.data.settings import TaggedDataConfig

TABLES = (".csv", ".tsv")
MAX_COLUMNS = 1_000_000  # largest number of columns in a table without a header
MAX_FIRST_LINES = 100_000  # lines that are searched for the values of the first line
MANY_WORDS = 5  # a value with this many words or more is text, not a column name
SHOWN_COLUMNS, SHOWN_CHARACTERS = 12, 20  # how much of a first line a message quotes
Data = TypeVar("Data", bound=DataConfig)
Header = bool | Sequence[str]  # True: the first line has the column names; False: no names; otherwise the names


@dataclass(frozen=True)
class Columns:
    """The configured columns: names, or numbers for tables without a header. None: a column with a usual name."""

    text: Column | None = None
    pair: Column | None = None  # the second text
    label: Column | None = None
    tag: int | None = None  # in CoNLL files
    system: Column | None = None  # the system message of a chat
    tools: Column | None = None  # of a chat
    labels: tuple[str, ...] = ()  # columns with 0 or 1, one for each label, instead of `label`

    @classmethod
    def of(cls, data: DataConfig) -> Columns:
        tag = data.tag_column if isinstance(data, TaggedDataConfig) else None
        label = data.label_column
        if isinstance(label, list):
            return cls(data.text_column, data.text_pair_column, None, tag, labels=tuple(label))
        return cls(data.text_column, data.text_pair_column, label, tag)

    def set_in(self, data: Data) -> Data:
        """Returns settings of the data with these columns."""
        label = [*self.labels] if self.labels else self.label
        columns = {"text_column": self.text, "text_pair_column": self.pair, "label_column": label}
        columns |= {"tag_column": self.tag}
        return data.model_copy(
            update={key: value for key, value in columns.items() if getattr(data, key, None) != value}
        )

    @property
    def named(self) -> list[Column]:
        """The columns that are set, except that of tags."""
        return [column for column in (self.text, self.pair, self.label, *self.labels) if column is not None]

    @property
    def has_header(self) -> bool:
        """True if .csv and .tsv files start with a header, because no column is a number."""
        return not any(isinstance(column, int) for column in (*self.named, self.tag))


def is_table(path: Path) -> bool:
    return suffix_of(path) in TABLES


def read_table(path: Path, header: Header) -> Iterator[SourceRow]:
    """Yields the rows of a .csv or .tsv file; an unreadable line of a table separated by tabs has a `problem`.

    Some .csv files, such as STS-B, are separated by tabs. Such tables have no quotes. Fields beyond the columns of the
    header are dropped.
    """
    with reading_file(path):
        with open_bytes(path) as file:
            has_tabs = suffix_of(path) == ".tsv" or b"\t" in file.readline(MAX_LINE)
        lines = map(_split_at_tabs, read_lines(path)) if has_tabs else _csv_lines(path, 0 if header is True else 1)
        columns: Sequence[str] | None = None if isinstance(header, bool) else header
        if header is True:
            first = next(lines, None)
            columns = first.readable_value() if first else ()
        for line in lines:
            yield line if line.problem else _row(line, columns, fills=not has_tabs)


def _csv_lines(path: Path, first: int) -> Iterator[SourceRow]:
    """Yields the fields of each line, numbered from `first`."""
    csv.field_size_limit(MAX_LINE)
    with open_text(path) as file:
        reader = csv.reader(_bounded_lines(file, path), strict=True)
        try:
            for number, fields in enumerate(filter(None, reader), first):
                yield SourceRow(f"{path}, row {number}", fields)
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num} is not valid CSV: {error}{ROW_REMEDY}") from None


def _split_at_tabs(line: SourceRow) -> SourceRow:
    return line if line.problem else line._replace(value=line.value.removesuffix("\n").removesuffix("\r").split("\t"))


def _row(line: SourceRow, columns: Sequence[str] | None, fills: bool) -> SourceRow:
    """Maps column names to the fields of a line. Without `columns`, the keys are column numbers.

    Missing last fields are None if `fills`; otherwise such a line has a problem.
    """
    fields, problem = line.value, None
    if columns is None:
        if len(fields) > MAX_COLUMNS:
            raise ConfigError(f"{line.where} has more than {MAX_COLUMNS:,} columns; remove unneeded ones.")
        return line._replace(value=dict(enumerate(fields)))
    if len(fields) < len(columns) and not fills:
        problem = f"{line.where} has {len(fields)} columns, but the header has {len(columns)}; fix or remove the line."
    return SourceRow(line.where, dict(zip_longest(columns, fields[: len(columns)])), problem)


def _bounded_lines(file: IO[str], path: Path) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        require_length(len(line), f"{path}, line {number}")
        if "\0" in line:
            raise binary_file(path)
        yield line


@dataclass(frozen=True)
class FirstLine:
    """The first line of a table without a known column name, compared with later lines."""

    path: Path
    values: tuple[str, ...]
    repeated: tuple[int, ...]  # columns whose value recurs in the first later line that repeats any value
    numeric: tuple[int, ...]  # columns that have only numbers up to that line

    @classmethod
    def of(cls, path: Path, names: Iterable[Column]) -> FirstLine | None:
        """Reads a table; returns None if it is empty or its first line contains one of the column `names`."""
        lines = table_lines(path)
        values, repeated = next(lines, ()), list[int]()
        if {value.strip().casefold() for value in values} & {str(name).casefold() for name in names}:
            return None
        numeric = [column for column, value in enumerate(values) if _is_number(value)]
        for line in lines:
            if line != values:
                same = zip(values, line, strict=False)
                repeated = [column for column, (value, other) in enumerate(same) if value and value == other]
                numeric = [column for column in numeric if column < len(line) and _is_number(line[column])]
            if repeated:
                break
        return cls(path, values, (*repeated,), (*numeric,)) if values else None

    @property
    def label_column(self) -> int | None:
        """The number of the label's column if the line consists of a text and a label, else None."""
        found = self.repeated or self.numeric
        if len(self.values) != 2 or len(found) != 1:
            return None
        return found[0] if len(self.values[1 - found[0]].split()) > 1 else None

    @property
    def looks_like_data(self) -> bool:
        is_text = any(len(value.split()) >= MANY_WORDS for value in self.values)
        # pandas writes 0, 1, 2, ... as the header of columns without names
        has_numbers_as_names = self.values == tuple(map(str, range(len(self.values))))
        return bool(self.repeated or self.numeric or is_text) and not has_numbers_as_names

    def refusal(self, advice: str) -> ConfigError:
        shown = (value[:SHOWN_CHARACTERS] for value in self.values[:SHOWN_COLUMNS])
        columns = ", ".join(f'{number} is "{value}"' for number, value in enumerate(shown))
        return ConfigError(
            f"{self.path}: its first line looks like data, not like column names (column {columns}); {advice}."
        )


def first_lines_of_data(paths: Iterable[Path], columns: Columns, names: Iterable[Column]) -> list[FirstLine]:
    """Returns the first line of each table that has none of the column `names`, if any of them looks like data."""
    found = [FirstLine.of(path, names) for path in paths if is_table(path)] if columns.has_header else []
    unnamed = [first for first in found if first]
    return unnamed if any(first.looks_like_data for first in unnamed) else []


def table_lines(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the values of the readable lines of a table, up to `MAX_FIRST_LINES`."""
    for row in islice(read_table(path, header=False), MAX_FIRST_LINES):
        if row.problem is None:
            yield tuple(row.value.values())


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def require_no_header(paths: Iterable[Path], columns: Columns) -> None:
    """Raises ConfigError if columns are set by number, but the first line of a table is a header.

    It is one if the label's column, or else the text's, has a usual name there, such as "label" or "text".
    """
    chosen = ("label_column", columns.label, LABEL_COLUMNS), ("text_column", columns.text, TEXT_NAMES)
    for path in () if columns.has_header else filter(is_table, paths):
        names: Row = dict(enumerate(next(table_lines(path), ())))
        inside = [(key, number, usual) for key, number, usual in chosen if find_column(names, number) is not None]
        for key, number, usual in inside[:1]:
            name = names[find_column(names, number)]
            if name.strip().casefold() in usual:
                raise ConfigError(
                    f"{path}: its first line is a header with the column {name}, but data.{key} {number} is a column "
                    f"number, which is for files without a header; remove that line, or set data.{key} to the name."
                )

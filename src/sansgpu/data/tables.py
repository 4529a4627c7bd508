"""Reads .csv and .tsv files, and detects those without a header, whose first line would be read as column names.

The first line is a header if it contains a column name that the form of the rows looks for. Otherwise it is data if two
signs agree: its label, tag or relation occurs in another line, too, and another value cannot be a column name. If the
signs disagree, an error names the settings to use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.config.wording import truncate
from sansgpu.data.formats.dialects import MAX_EMPTY, Dialect, FileFormat, empty_words, recognize_table
from sansgpu.data.formats.encodings import AUTO
from sansgpu.data.formats.names import TABLES
from sansgpu.data.formats.opening import MAX_LINE, suffix_of
from sansgpu.data.formats.records import TextLine, quoted_records
from sansgpu.data.formats.spreadsheets import SPREADSHEETS, sheet_rows
from sansgpu.data.lines import (
    binary_file,
    encoding_name,
    open_text,
    read_lines,
    reading_file,
    require_length,
    undecodable,
)
from sansgpu.data.rows import (
    CHAT_NAMES,
    LABEL_COLUMNS,
    TEXT_NAMES,
    BadRowError,
    Column,
    Row,
    SourceRow,
    find_column,
    is_text,
)
from sansgpu.data.settings import TaggedDataConfig

MAX_COLUMNS = 1_000_000  # largest number of columns in a table
MAX_FIRST_LINES = 100_000  # lines that are searched for the values of the first line
MANY_WORDS = 5  # a value with this many words or more is text, not a column name
SHOWN_COLUMNS, SHOWN_CHARACTERS = 12, 20  # how much of a first line a message quotes
Data = TypeVar("Data", bound=DataConfig)
Header = bool | Sequence[str]  # True: the first line has the column names; False: no names; otherwise the names


@dataclass(frozen=True)
class Columns:
    """The configured columns: names, or numbers for tables without a header. None: a column with a usual name.

    Also how the files that have them are written.
    """

    text: Column | None = None
    pair: Column | None = None  # the second text
    label: Column | None = None
    tag: int | None = None  # in CoNLL files
    system: Column | None = None  # the system message of a chat
    tools: Column | None = None  # the functions that the model of a chat may call
    labels: tuple[str, ...] = ()  # columns with 0 or 1, one for each label, instead of `label`
    separator: str = AUTO
    encoding: str = AUTO

    @classmethod
    def of(cls, data: DataConfig) -> Columns:
        label, tag = data.label_column, data.tag_column if isinstance(data, TaggedDataConfig) else None
        return cls(
            data.text_column,
            data.text_pair_column,
            None if isinstance(label, list) else label,
            tag,
            data.system_column,
            data.tools_column,
            labels=tuple(label) if isinstance(label, list) else (),
            separator=data.separator,
            encoding=data.encoding,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    def __hash__(self) -> int:
        return self._hash  # columns are a part of keys that each row looks up

    @property
    def format(self) -> FileFormat:
        """How the files are written, with the columns in which words such as NA mean that there is no value."""
        usual = *TEXT_NAMES, *LABEL_COLUMNS, "text_pair"
        return FileFormat(self.separator, self.encoding, (*usual, *self.named), CHAT_NAMES)

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

    @cached_property
    def nested(self) -> tuple[str, ...]:
        """The columns whose names may be paths into objects, such as `review.body`."""
        return tuple(name for name in self.all_named if isinstance(name, str) and "." in name)

    @property
    def all_named(self) -> tuple[Column | None, ...]:
        """All columns that are set, and None."""
        return (*self.named, self.tag, self.system, self.tools)

    @property
    def has_header(self) -> bool:
        """True if .csv and .tsv files start with a header, because no column is a number."""
        return not any(isinstance(column, int) for column in self.all_named)


def is_table(path: Path) -> bool:
    return suffix_of(path) in TABLES


def read_table(path: Path, header: Header, configured: FileFormat) -> Iterator[SourceRow]:
    """Yields the rows of a table; a line that cannot be read, or has more fields than the header, has a `problem`.

    Quotes around fields are recognized, except in tables separated by tabs that use them as ordinary characters. Rows
    without any value are left out.
    """
    with reading_file(path, encoding=configured.encoding):
        dialect = recognize_table(path, configured)
        lines = _table_lines(path, dialect, 0 if header is True else 1)
        columns: Sequence[str] | None = None if isinstance(header, bool) else header
        first = next(lines, None) if header is True else None
        if first is not None:
            if first.problem:
                raise BadRowError(first.problem)
            fields = first.fields[dialect.header_index :]
            _require_columns(first, fields)
            columns = _column_names(path, fields, configured)
        table = _TableRows(path, dialect, configured, columns)
        for line in lines:
            row = table.row(line)
            if row is not None:
                yield row


class _TableLine(NamedTuple):
    """The fields of a record, its location, and the line where it starts. `problem` says why it cannot be read."""

    where: str
    line: str
    fields: list[str]
    problem: str | None = None


def _table_lines(path: Path, dialect: Dialect, first: int) -> Iterator[_TableLine]:
    """Yields the fields of each record. Those in quotes, which may have several lines, are numbered from `first`."""
    line_prefix, row_prefix = f"{path}, line ", f"{path}, row "
    if suffix_of(path) in SPREADSHEETS:
        for number, cells in islice(enumerate(sheet_rows(path), 1), dialect.skipped_lines, None):
            where = f"{row_prefix}{number}"
            yield _TableLine(where, where, cells)
    elif not dialect.has_quotes:
        for line in islice(read_lines(path, encoding=dialect.encoding), dialect.skipped_lines, None):
            text = "" if line.problem else line.value.removesuffix("\n").removesuffix("\r")
            yield _TableLine(line.where, line.where, text.split(dialect.separator), line.problem)
    else:
        lines = islice(_bounded_lines(path, dialect.encoding), dialect.skipped_lines, None)
        records = quoted_records(path, lines, dialect.separator, dialect.fields, dialect.skip_spaces)
        for number, record in enumerate(records, first):
            where = f"{line_prefix}{record.line}"
            if record.problem:
                yield _TableLine(where, where, [], record.problem)
            else:
                yield _TableLine(f"{row_prefix}{number}", where, record.fields)


def _bounded_lines(path: Path, encoding: str) -> Iterator[TextLine]:
    """Yields the lines of a table, which may end in carriage returns. Raises ConfigError if one is too long."""
    with open_text(path, encoding, "surrogateescape") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                require_length(len(line), f"{path}, line {number}")
            if "\0" in line:
                raise binary_file(path)
            problem = ""
            if not line.isascii() and not is_text(line):
                byte = next(ord(char) for char in line if "\udc80" <= char <= "\udcff") & 0xFF
                problem = undecodable(f"{path}, line {number}", encoding_name(path, encoding), byte)
            yield TextLine(number, line, problem)


def _column_names(path: Path, fields: Sequence[str], configured: FileFormat) -> list[str]:
    """Returns the names of the columns. Without a name it is the number; of equal names, only the last one is kept.

    Raises ConfigError if equal names are those of a column that is read, such as `text`.
    """
    names = [field if field in configured.values else field.strip() for field in fields]
    last = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        if name in configured.values and last[name] != number:
            raise ConfigError(
                f"{path}: its header has the column {truncate(name)} more than once (columns {number} and "
                f"{last[name]}); give each a different name."
            )
    return [
        name if name and last[name] == number else f"{name or 'column'} {number}" for number, name in enumerate(names)
    ]


def _require_columns(line: _TableLine, fields: Sequence[str]) -> None:
    if len(fields) > MAX_COLUMNS:
        raise ConfigError(f"{line.line} has more than {MAX_COLUMNS:,} columns; remove unneeded ones.")


class _TableRows:
    """Makes rows of the fields of a table's records."""

    def __init__(self, path: Path, dialect: Dialect, configured: FileFormat, columns: Sequence[str] | None) -> None:
        self._path, self._dialect, self._columns = path, dialect, columns
        self._first = int(dialect.row_index)  # the field after the index
        names = columns if columns is not None else [*range(len(dialect.names))]
        self._empty = empty_words(dialect, configured, names)

    def row(self, line: _TableLine) -> SourceRow | None:
        """Maps column names to the fields of a record. Without columns, the keys are column numbers.

        Missing last fields are None if the table has quotes; otherwise such a line has a problem. Returns None if all
        fields are empty.
        """
        if line.problem:
            return SourceRow(line.line, None, line.problem)
        fields = line.fields[self._first :]
        _require_columns(line, fields)
        if not any(map(str.strip, fields)):
            return None
        if self._columns is None:
            return SourceRow(line.where, dict(enumerate(self._values(fields))))
        count, problem = len(self._columns), None
        if len(fields) == count:
            return SourceRow(line.where, dict(zip(self._columns, self._values(fields), strict=True)))
        if len(fields) < count and not self._dialect.has_quotes:
            problem = f"{line.line} has {len(fields)} columns, but the header has {count}; fix or remove the line."
        elif any(map(str.strip, fields[count:])):
            problem = f"{line.line} has {len(fields)} columns, but the header has {count}; {self._remedy}."
        row = dict(zip_longest(self._columns, self._values(fields[:count])))
        return SourceRow(line.where if problem is None else line.line, row, problem)

    def _values(self, fields: list[str]) -> list[str | None]:
        """Returns the fields, with None for cells that count as empty, such as NaN."""
        values: list[str | None] = [*fields]
        for number, empty in enumerate(self._empty[: len(fields)]):
            if len(fields[number]) <= MAX_EMPTY and fields[number].strip() in empty:
                values[number] = None
        return values

    @property
    def _remedy(self) -> str:
        if not self._dialect.has_quotes or suffix_of(self._path) in SPREADSHEETS:
            return "fix or remove the line"
        name = {",": "comma", ";": "semicolon", "|": "bar", "\t": "tab"}.get(self._dialect.separator, "separator")
        columns = self._columns or ()
        other = ", or set data.separator to a character that no text has" if len(columns) == 1 else ""
        return f"put a text that contains a {name} in quotes, or remove the line{other}"


@dataclass(frozen=True)
class FirstLine:
    """The first line of a table without a known column name, compared with later lines."""

    path: Path
    values: tuple[str, ...]
    repeated: tuple[int, ...]  # columns whose value recurs in the first later line that repeats any value
    numeric: tuple[int, ...]  # columns that have only numbers up to that line

    @classmethod
    def of(cls, path: Path, names: Iterable[Column], columns: Columns) -> FirstLine | None:
        """Reads a table; returns None if it is empty or its first line contains one of the column `names`."""
        lines = table_lines(path, columns)
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
    found = [FirstLine.of(path, names, columns) for path in paths if is_table(path)] if columns.has_header else []
    unnamed = [first for first in found if first]
    return unnamed if any(first.looks_like_data for first in unnamed) else []


def table_lines(path: Path, columns: Columns) -> Iterator[tuple[str, ...]]:
    """Yields the values of the readable lines of a table, up to `MAX_FIRST_LINES`; empty ones are empty strings."""
    for row in islice(read_table(path, False, columns.format), MAX_FIRST_LINES):
        if row.problem is None:
            yield tuple(value or "" for value in row.value.values())


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
        names: Row = dict(enumerate(next(table_lines(path, columns), ())))
        inside = [(key, number, usual) for key, number, usual in chosen if find_column(names, number) is not None]
        for key, number, usual in inside[:1]:
            name = names[find_column(names, number)]
            if name.strip().casefold() in usual:
                raise ConfigError(
                    f"{path}: its first line is a header with the column {name}, but data.{key} {number} is a column "
                    f"number, which is for files without a header; remove that line, or set data.{key} to the name."
                )

"""Detects .csv and .tsv files without a header, whose first line of data would be read as column names.

The first line is a header if it contains a column name that the task looks for. Otherwise it is data if two signs
agree: its label, tag or relation occurs in another line, too, and another value cannot be a column name. If the signs
disagree, the task raises an error that names the settings to use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sansgpu.config import Config, ConfigError, DataConfig
from sansgpu.data.files import file_form, read_rows
from sansgpu.data.rows import LABEL_COLUMNS, TEXT_NAMES
from sansgpu.data.sources import local_files

TABLES = (".csv", ".tsv")
MAX_LINES = 100_000  # lines that are searched for the values of the first line
MANY_WORDS = 5  # a value with this many words or more is text, not a column name
SHOWN_COLUMNS, SHOWN_CHARACTERS = 12, 20  # how much of a first line a message quotes


def require_columns(config: Config) -> None:
    """Raises ConfigError if the meaning of the columns of a configured local table is unclear."""
    if config.settings.check_columns is not None:
        config.settings.check_columns(config)


@dataclass(frozen=True)
class FirstLine:
    """The first line of a table without a known column name, compared with later lines."""

    path: Path
    values: tuple[str, ...]
    repeated: tuple[int, ...]  # columns whose value recurs in the first later line that repeats any value
    numeric: tuple[int, ...]  # columns that have only numbers up to that line

    @classmethod
    def of(cls, path: Path, names: Iterable[str | int]) -> FirstLine | None:
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
        return bool(self.repeated or self.numeric or is_text) and not self.numbers_columns

    @property
    def numbers_columns(self) -> bool:
        """True if the values are 0, 1, 2, ..., which pandas writes as the header of unnamed columns."""
        return self.values == tuple(map(str, range(len(self.values))))

    def refusal(self, advice: str) -> ConfigError:
        shown = (value[:SHOWN_CHARACTERS] for value in self.values[:SHOWN_COLUMNS])
        columns = ", ".join(f'{number} is "{value}"' for number, value in enumerate(shown))
        return ConfigError(
            f"{self.path}: its first line looks like data, not like column names (column {columns}); {advice}."
        )


def table_lines(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the values of the readable lines of a table, up to `MAX_LINES`."""
    for row in islice(read_rows(path, header=False), MAX_LINES):
        if row.problem is None:
            yield tuple(row.value.values())


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def require_no_header(data: DataConfig) -> None:
    """Raises ConfigError if columns are set by number, but the first line of a table is a header.

    It is one if the label's column, or else the text's, has a usual name there, such as "label" or "text".
    """
    chosen = {"label_column": LABEL_COLUMNS, "text_column": TEXT_NAMES}
    for path in () if data.has_header else local_files(data, text_rows=True):
        values = next(table_lines(path), ()) if file_form(path) in TABLES else ()
        numbers = {key: column for key in chosen if isinstance(column := getattr(data, key), int)}
        inside = {key: column for key, column in numbers.items() if -len(values) <= column < len(values)}
        key, column = next(iter(inside.items()), ("", 0))
        if inside and values[column].strip().casefold() in chosen[key]:
            raise ConfigError(
                f"{path}: its first line is a header with the column {values[column]}, but data.{key} {column} is "
                f"a column number, which is for files without a header; remove that line, or set data.{key} to the "
                "name."
            )

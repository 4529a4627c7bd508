"""Finds tables without a header: a first line of data would otherwise be taken for the names of columns.

A first line with one of the names that the task looks for is a header. Any other line is data only if two signs agree:
its label, tag or relation occurs again in another line, and another value cannot be the name of a column. If only some
of this is true, the file is refused with the settings that resolve it.
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
MAX_LINES = 100_000  # lines in which a value of the first line may occur again
MANY_WORDS = 5  # a value with as many words is a text rather than the name of a column
SHOWN_COLUMNS, SHOWN_CHARACTERS = 12, 20  # a message quotes at most these of a first line


def require_columns(config: Config) -> None:
    """Raises ConfigError if it is unclear what the columns of the configured local tables are."""
    if config.settings.check_columns is not None:
        config.settings.check_columns(config)


@dataclass(frozen=True)
class FirstLine:
    """The values of a table's first line, none of which is a wanted name, compared with later lines that differ."""

    path: Path
    values: tuple[str, ...]
    repeated: tuple[int, ...]  # columns whose value occurs again, in the first line in which any does
    numeric: tuple[int, ...]  # columns with numbers only, up to that line

    @classmethod
    def of(cls, path: Path, names: Iterable[str | int]) -> FirstLine | None:
        """Reads a table; None if it is empty or its first line has one of the wanted `names`."""
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
        """The column of the label if the line is a text and its label."""
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
        """True if the values are 0, 1, 2, ..., the header that pandas writes for columns without names."""
        return self.values == tuple(map(str, range(len(self.values))))

    def refusal(self, advice: str) -> ConfigError:
        shown = (value[:SHOWN_CHARACTERS] for value in self.values[:SHOWN_COLUMNS])
        columns = ", ".join(f'{number} is "{value}"' for number, value in enumerate(shown))
        return ConfigError(
            f"{self.path}: its first line looks like data instead of names of columns (column {columns}); {advice}."
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
    """Raises ConfigError if columns are set by number, but a table's first line has the usual name of the label there.

    If the label is not set or the table has none, the usual name of the text decides.
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
                f"the number of a column in files without one; remove that line, or set data.{key} to the name."
            )

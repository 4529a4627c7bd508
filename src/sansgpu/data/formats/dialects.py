"""Recognizes how a table is written: its separator and quotes, an index column, and cells that count as empty."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path

from sansgpu.config.wording import counted, truncate
from sansgpu.data.formats.encodings import AUTO, UTF8, open_utf8, resolve_encoding
from sansgpu.data.formats.opening import BLOCK, archive_of, suffix_of
from sansgpu.data.formats.records import NOT_CLOSED, TextLine, quoted_records
from sansgpu.data.formats.spreadsheets import SPREADSHEETS, sheet_names, sheet_rows

SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
MAX_SAMPLE = 500  # records that are read to recognize a table
MAX_TITLES = 5  # records above a header
MAX_NAMES = 8  # column names in a message
MIN_SHARE = 0.5  # a separator is recognized if this share of records has as many fields as the first
# Cells that programs write for a missing value: pandas, SQL, Excel and its errors.
EMPTY_CELLS = frozenset(
    ("nan", "NaN", "-nan", "-NaN", "NaT", "NULL", "<NA>", "#N/A", "#NA", "#NAME?", "#VALUE!", "#REF!", "#DIV/0!")
)
# Words for a missing value that may as well be a class or a name. They count as empty in columns of texts and labels,
# unless they are as frequent there as the other values of the column.
EMPTY_WORDS = ("None", "NA", "N/A", "n/a", "null")
WORD_COLUMNS = ("word", "token")  # columns of tables with a word in each row, which may be any
MAX_EMPTY = max(map(len, (*EMPTY_CELLS, *EMPTY_WORDS)))
_DIRECTIVE = re.compile(r"sep=(.)\r?\n?")  # Excel's first line of a table, e.g. sep=;
_SAMPLE = Path("sample")  # is in no message
_UNNAMED = re.compile(r"(Unnamed: \d+)?")  # the header of an index, as pandas writes it once and twice


@dataclass(frozen=True)
class FileFormat:
    """How files are configured to be read. `auto` recognizes it."""

    separator: str = AUTO
    encoding: str = AUTO
    values: tuple[str | int, ...] = ()  # the columns of texts and labels, in which words like NA mean an empty cell
    chats: tuple[str, ...] = ()  # the columns of chats, in which they do even if they are frequent

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that are not the default, for a fingerprint of the data."""
        default = FileFormat()
        return tuple(
            f"{key}={value}"
            for key, value, usual in (
                ("separator", self.separator, default.separator),
                ("encoding", self.encoding, default.encoding),
            )
            if value != usual
        )


@dataclass(frozen=True)
class Dialect:
    """How a table is written."""

    separator: str
    encoding: str
    names: tuple[str, ...] = ()  # the fields of its first record, without the index
    has_quotes: bool = True
    skip_spaces: bool = False  # spaces after separators are no part of the fields
    skipped_lines: int = 0  # before the first record
    titles: int = 0  # the skipped lines that are titles above the header of a table
    row_index: bool = False  # the first field of each record, except for the header, is an index
    header_index: bool = False  # so is that of the header
    words: tuple[tuple[int, str], ...] = ()  # the EMPTY_WORDS that are values, with their column

    @property
    def fields(self) -> int:
        """The number of fields of a record, with its index."""
        return len(self.names) + self.row_index

    @property
    def is_plain(self) -> bool:
        return self.encoding == UTF8 and not (self.row_index or self.words or self.skipped_lines or self.skip_spaces)


def recognize_table(path: Path, configured: FileFormat) -> Dialect:
    """Returns how a .csv or .tsv file, or a spreadsheet is written. Raises ConfigError and OSError."""
    outer = archive_of(path) or path
    status = outer.stat()
    return _recognized(path, configured, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _recognized(path: Path, configured: FileFormat, changed: int, size: int) -> Dialect:
    if suffix_of(path) in SPREADSHEETS:
        sheet = [*islice(sheet_rows(path), MAX_SAMPLE)]
        titles = _titles(sheet, configured)
        dialect = Dialect(",", UTF8, skipped_lines=titles, titles=titles)
        return _with_content(dialect, [*filter(any, sheet[titles:])], configured)
    lines = _sample(path, configured.encoding)
    dialect = Dialect(default_separator(path), resolve_encoding(path, configured.encoding))
    if lines and (directive := _DIRECTIVE.fullmatch(lines[0])):
        dialect = replace(dialect, separator=directive[1], skipped_lines=1)
        lines = lines[1:]
    if titles := _titles_of_text(lines, dialect, configured):
        dialect = replace(dialect, skipped_lines=dialect.skipped_lines + titles, titles=titles)
        lines = lines[titles:]
    if configured.separator != AUTO:
        dialect = replace(dialect, separator=configured.separator)
    elif dialect.skipped_lines == titles:  # no directive says it
        dialect = replace(dialect, separator=_separator(lines, dialect.separator))
    if dialect.separator == "\t":
        dialect = replace(dialect, has_quotes=_has_quotes(lines))
    records = _records(lines, dialect.separator, dialect.has_quotes)
    if records and dialect.separator != "\t":
        dialect = replace(dialect, skip_spaces=all(map(_has_spaces, records)))
        records = _records(lines, dialect.separator, dialect.has_quotes, dialect.skip_spaces)
    return _with_content(dialect, records, configured)


def default_separator(path: Path) -> str:
    return "\t" if suffix_of(path) == ".tsv" else ","


def _sample(path: Path, encoding: str) -> list[str]:
    """Returns the first lines of a table, with their line ends."""
    lines: list[str] = []
    with open_utf8(path, encoding) as file:
        left = BLOCK
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            if left > 0 or not lines:  # the last line may be cut
                lines += _universal_lines(line.decode("utf-8", "replace"))
    if lines:
        lines[0] = lines[0].removeprefix("\ufeff")
    return lines


def _universal_lines(line: str) -> list[str]:
    """Splits a line at carriage returns that are not before its end."""
    return re.split(r"(?<=\r)(?!\n|$)", line)


def _records(lines: Iterable[str], separator: str, has_quotes: bool, skip_spaces: bool = False) -> list[list[str]]:
    """Returns the fields of the first records that can be read."""
    if not has_quotes:
        return [line.rstrip("\r\n").split(separator) for line in lines if line.strip()][:MAX_SAMPLE]
    numbered = (TextLine(number, line) for number, line in enumerate(lines, 1))
    records = quoted_records(_SAMPLE, numbered, separator, skip_spaces=skip_spaces)
    # The sample may end within a field of many lines, which are no records.
    whole = takewhile(lambda record: NOT_CLOSED not in record.problem, records)
    return [record.fields for record in islice(whole, MAX_SAMPLE) if not record.problem and any(record.fields)]


def _titles_of_text(lines: Sequence[str], dialect: Dialect, configured: FileFormat) -> int:
    """Returns the number of lines above the header of a text file, with any separator that is not set."""
    known = dialect.separator if configured.separator == AUTO else configured.separator
    is_known = configured.separator != AUTO or dialect.skipped_lines
    for separator in (known,) if is_known else SEPARATORS:
        records = (_records([line], separator, has_quotes=True) for line in lines[: MAX_TITLES + 1])
        if titles := _titles([record for found in records for record in found or [[]]], configured):
            return titles
    return 0


def _titles(records: Sequence[Sequence[str]], configured: FileFormat) -> int:
    """Returns the number of records above the header, such as a title, of which none has more than one value.

    The header is the first record with several values, if one of them is a usual name of a column.
    """
    usual = {name.casefold() for name in (*configured.values, *configured.chats) if isinstance(name, str)}
    for number, record in enumerate(records[: MAX_TITLES + 1]):
        values = {field.strip().casefold() for field in record} - {""}
        if len(values) > 1:
            return number if values & usual else 0
        if values & usual:  # a header with one column
            return 0
    return 0


def _separator(lines: Sequence[str], default: str) -> str:
    """Returns the separator by which the largest share of the records has as many fields as the first one.

    Of several, a tab in the first line comes first, and then the comma. If the default is a tab, another one is only
    taken if no line has a tab, and not all of them are punctuation marks of a text.
    """
    if default == "\t" and any("\t" in line for line in lines):
        return default
    order = sorted(SEPARATORS, key=lambda separator: (separator != "\t", separator != ","))
    shares = {separator: _share(lines, separator) for separator in order if any(map(str.strip, lines))}
    best = max(shares, key=shares.__getitem__, default=",")
    if not shares or shares[best] < MIN_SHARE:
        return "\t" if lines and "\t" in lines[0] else default
    if default == "\t" and _is_prose(lines, best):
        return default
    if best == "," and shares[";"] == shares[","] and _is_prose(lines, ","):
        return ";"
    return best


def _share(lines: Sequence[str], separator: str) -> float:
    """Returns the share of the records that have as many fields as the first one; 0 if that has only one."""
    records = _records(lines, separator, has_quotes=separator != "\t")
    if not records or len(records[0]) < 2:
        return 0.0
    if _has_row_names(records):
        return 1.0
    columns = len(records[0])  # empty fields at the end of a record are none
    fitting = sum(len(record) == columns or len(record) > columns >= _filled(record) for record in records[1:])
    return (1 + fitting) / len(records)


def _filled(record: Sequence[str]) -> int:
    """Returns the number of fields up to the last one that is not empty."""
    return max((number for number, field in enumerate(record, 1) if field.strip()), default=0)


def _is_prose(lines: Sequence[str], separator: str) -> bool:
    """Returns whether all separators are followed by a space."""
    return all(not re.search(rf"{re.escape(separator)}\S", line.rstrip("\r\n")) for line in lines)


def _has_spaces(record: Sequence[str]) -> bool:
    return len(record) > 1 and all(field.startswith(" ") for field in record[1:] if field)


def _has_quotes(lines: Sequence[str]) -> bool:
    """Returns whether fields between tabs may be in quotes, as pandas writes them; otherwise quotes are characters.

    They are if more records then have as many fields as the first one, or if not fewer have, and all fields of the
    first one are in quotes, or those in quotes have doubled quotes inside.
    """
    if not any('"' in line for line in lines):
        return False
    plain = _records(lines, "\t", has_quotes=False)
    numbered = (TextLine(number, line) for number, line in enumerate(lines, 1))
    quoted = [*islice(quoted_records(_SAMPLE, numbered, "\t"), MAX_SAMPLE)]
    quoted = quoted[:-1] if len(quoted) > 1 and quoted[-1].problem else quoted  # the sample may end within quotes
    columns = len(quoted[0].fields)
    fitting = sum(not record.problem and len(record.fields) == columns for record in quoted) / len(quoted)
    plain_fitting = sum(len(record) == len(plain[0]) for record in plain) / len(plain)
    if fitting != plain_fitting:
        return fitting > plain_fitting
    cells = [cell[1:-1] for record in plain for cell in record if len(cell) > 1 and cell[0] == cell[-1] == '"']
    doubled = any('""' in cell for cell in cells) and not any('"' in cell.replace('""', "") for cell in cells)
    return doubled or all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in plain[0])


def _has_row_names(records: Sequence[Sequence[str]]) -> bool:
    """Returns whether records have one field more than the header, an index, as R writes it."""
    return len(records) > 1 and all(len(r) == len(records[0]) + 1 and _is_integer(r[0]) for r in records[1:])


def _is_integer(field: str) -> bool:
    return field.strip().removeprefix("-").isdecimal()


def _with_content(dialect: Dialect, records: list[list[str]], configured: FileFormat) -> Dialect:
    """Returns the dialect with what depends on the fields of the first records."""
    if not records:
        return dialect
    header, *rows = records
    if _has_row_names(records):
        dialect = replace(dialect, row_index=True)
    elif len(header) > 1 and rows and _UNNAMED.fullmatch(header[0].strip()):
        filled = [row for row in rows if any(map(str.strip, row))]
        if filled and all(_is_integer(row[0]) for row in filled):
            dialect = replace(dialect, row_index=True, header_index=True)
    names = tuple(name.strip() for name in header[dialect.header_index :])
    rows = [row[dialect.row_index :] for row in rows]
    return replace(dialect, names=names, words=tuple(_frequent_words(names, rows, configured)))


def _frequent_words(names: Sequence[str], rows: list[list[str]], configured: FileFormat) -> Iterable[tuple[int, str]]:
    """Yields the words for a missing value that are classes: those as frequent as the other values of their column."""
    for number, name in enumerate(names):
        if not {name, number} & {*configured.values}:
            continue
        counts = Counter(row[number].strip() for row in rows if number < len(row))
        others = [count for value, count in counts.items() if value and value not in (*EMPTY_WORDS, *EMPTY_CELLS)]
        mean = sum(others) / len(others) if others else 0.0
        for word in EMPTY_WORDS:
            if mean >= 1.5 and counts[word] > 1 and counts[word] >= mean / 2:
                yield number, word


def empty_words(dialect: Dialect, configured: FileFormat, names: Sequence[str | int]) -> list[frozenset[str]]:
    """Returns, for each column, the cells that count as empty."""
    found = []
    for number, name in enumerate(names):
        if str(name).casefold() in WORD_COLUMNS:
            found.append(frozenset[str]())
            continue
        ambiguous = EMPTY_WORDS if {name, number} & {*configured.values, *configured.chats} else ()
        found.append(EMPTY_CELLS | {word for word in ambiguous if (number, word) not in dialect.words})
    return found


def describe_table(path: Path, dialect: Dialect) -> str | None:
    """Returns how a table is written in a few words, or None if it is UTF-8 with the separator of its suffix."""
    is_sheet = suffix_of(path) in SPREADSHEETS
    sheet, others = sheet_names(path) if is_sheet else (None, [])
    if (is_sheet or dialect.separator == default_separator(path)) and dialect.is_plain and not others:
        return None
    separated = "" if is_sheet else f" separated by {SEPARATORS.get(dialect.separator, repr(dialect.separator))}"
    parts = [f"{counted(len(dialect.names), 'column')}{separated} ({', '.join(dialect.names[:MAX_NAMES])})"]
    parts += [f"sheet {sheet} without {counted(len(others), 'other sheet')}"] if others else []
    parts += [] if dialect.encoding == UTF8 else [f"encoding {dialect.encoding}"]
    parts += [f"{counted(dialect.titles, 'line')} above the header left out"] if dialect.titles else []
    parts += ["the index column left out"] if dialect.row_index else []
    parts += [f'"{word}" in column {dialect.names[number]} is a value' for number, word in dialect.words]
    return truncate(", ".join(parts))

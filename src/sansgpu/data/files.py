"""Files -> documents, in pieces small enough that no document is ever whole in memory."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.plain import cut, first_line

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".json", ".csv", ".parquet")
PIECE_CHARS = 1 << 20
# Bounds that keep a row within about a gigabyte of memory, whatever a file holds.
MOST_LINE = 64 << 20  # bytes or characters of a line, and characters of a field in a CSV file
MOST_JSON = 256 << 20  # characters of a .json file, which is parsed whole
MOST_VALUES = 8_000_000  # in one JSON text; Python takes up to 100 bytes for each
MOST_DEPTH = 100  # levels of nesting in one row
MOST_PROBLEM = 400  # characters of a message about a row
MOST_EXPANSION, FREE_EXPANSION = 200, 64 << 20  # size / compressed size; bytes below which the ratio does not matter


UNREADABLE = (OSError, EOFError, zlib.error)  # raised when a file is damaged


class Row(NamedTuple):
    """One row of a file or dataset; `problem` says why its value cannot be read."""

    where: str
    value: Any
    problem: str | None = None


def short(problem: str) -> str:
    """What is wrong with a row, without the rest of a long value that it quotes."""
    return problem if len(problem) <= MOST_PROBLEM else problem[:MOST_PROBLEM] + "..."


class Piece(NamedTuple):
    """A stretch of a document. Joined, a document's pieces are its text to the character."""

    text: str
    ends_document: bool


def file_form(path: Path) -> str | None:
    """The suffix that says how `path` is read, without .gz; None where it is not known."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in SUFFIXES else None


def pieces(text: str) -> Iterator[Piece]:
    """A document cut into pieces at line ends, so that a cut changes no word."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
        stop = cut if cut > start else start + PIECE_CHARS
        yield Piece(text[start:stop], False)
        start = stop
    if start < len(text):
        yield Piece(text[start:], True)


def read_documents(path: Path, column: str | None, skip_undecodable: bool = False) -> Iterator[Piece]:
    """The documents of one file: of .txt, .md and .py the whole file, of the others each row.

    Raises ConfigError where the file is not what its name says. With `skip_undecodable` a file that is not UTF-8
    is passed over.
    """
    try:
        if file_form(path) in TEXT_SUFFIXES:
            yield from _read_text(path)
        else:
            yield from _row_documents(_rows(path), column)
    except UnicodeDecodeError as error:
        if not skip_undecodable:
            raise _undecodable(path, error) from None
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one file; a line of a .jsonl that cannot be read is one with a problem.

    Raises ConfigError where the file has no rows, or is not what its name says.
    """
    if file_form(path) in TEXT_SUFFIXES:
        raise ConfigError(f"{path} is plain text, which has no rows; give a .jsonl, .json, .csv or .parquet file.")
    try:
        yield from _rows(path)
    except UnicodeDecodeError as error:
        raise _undecodable(path, error) from None
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def read_lines(path: Path) -> Iterator[Row]:
    """The lines of a file that are not empty, ended by "\\n" alone; a line that is not UTF-8 has a problem.

    Raises ConfigError if a line is longer than `MOST_LINE` bytes or the file cannot be read.
    """
    try:
        with _open_bytes(path) as file:
            number = 0
            while line := file.readline(MOST_LINE + 1):
                number += 1
                where = f"{path}, line {number}"
                _require_length(len(line), where)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    yield Row(where, None, f"{where} is not UTF-8 text (byte 0x{line[error.start]:02x}).")
                    continue
                if text.strip():
                    yield Row(where, text)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def _require_length(length: int, where: str) -> None:
    if length > MOST_LINE:
        raise ConfigError(f"{where} is longer than {MOST_LINE >> 20} MB; split it into several rows.")


def _undecodable(path: Path, error: UnicodeDecodeError) -> ConfigError:
    """The error for a text file that is not UTF-8; a second reading finds the line."""
    where = next((row.where for row in read_lines(path) if row.problem), path)
    return ConfigError(
        f"{where} is not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert the file or leave it out."
    )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error}.")


def _rows(path: Path) -> Iterator[Row]:
    match file_form(path):
        case ".jsonl":
            yield from _jsonl_rows(path)
        case ".json":
            yield from _json_rows(path)
        case ".csv":
            yield from _csv_rows(path)
        case ".parquet":
            yield from _parquet_rows(path)


def column_names(row: dict[str, Any]) -> str:
    """The names of a row's columns for a message."""
    return cut(", ".join(map(str, row)))


def row_text(row: dict[str, Any], column: str | None, where: str) -> str:
    """The text of one row: of `column`, else of `text`, `content` or the only column of strings."""
    if column is None:
        named = [name for name in ("text", "content") if name in row]
        strings = [name for name, value in row.items() if isinstance(value, str)]
        if not named and len(strings) != 1:
            raise ConfigError(f"{where} has the columns {column_names(row)}; set data.text_column to the text's.")
        column = (named or strings)[0]
    if column not in row:
        raise ConfigError(f"{where} has no column {cut(column)}, only {column_names(row)}; set data.text_column.")
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: column {column} holds a {type(text).__name__}, not text; set data.text_column.")
    return text


class _Unpacked(io.RawIOBase):
    """The content of a .gz file, which may not be `MOST_EXPANSION` times as large as the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, gzip.open(path)  # noqa: SIM115  closed by `close`
        self._left = max(FREE_EXPANSION, MOST_EXPANSION * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise ConfigError(
                f"{self._path} unpacks to more than {MOST_EXPANSION} times its size, as a decompression bomb does; "
                "unpack it yourself if its content is what you want."
            )
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_bytes(path: Path) -> IO[bytes]:
    return io.BufferedReader(_Unpacked(path), PIECE_CHARS) if path.suffix == ".gz" else path.open("rb")


def _open(path: Path) -> IO[str]:
    """Text to the character: no newline is translated."""
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", newline="")


def _read_text(path: Path) -> Iterator[Piece]:
    """One document; a piece is given out once the text behind it shows whether it was the last."""
    rest = ""
    with _open(path) as file:
        while block := file.read(PIECE_CHARS):
            if "\0" in block:
                raise ConfigError(f"{path} is a binary file (it holds NUL bytes); leave it out.")
            *whole, last = pieces(rest + block)
            yield from whole
            rest = last.text
    if rest:
        yield Piece(rest, True)


def _row_documents(rows: Iterator[Row], column: str | None) -> Iterator[Piece]:
    for where, row, problem in rows:
        if problem:
            raise ConfigError(problem)
        if not isinstance(row, (str, dict)):
            raise ConfigError(f"{where} is a {type(row).__name__}, not an object with a text.")
        text = row if isinstance(row, str) else row_text(row, column, where)
        if not is_text(text):
            raise ConfigError(f"{where} holds half a surrogate pair, which is no text; mend or drop the row.")
        yield from pieces(text)


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: JSON can write half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _jsonl_rows(path: Path) -> Iterator[Row]:
    for line in read_lines(path):
        if line.problem:
            yield line
            continue
        try:
            yield Row(line.where, _parse_json(line.value, line.where))
        except ConfigError as error:
            yield Row(line.where, None, str(error))


def _json_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        text = file.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise ConfigError(f"{path} is too large to parse whole; convert it to .jsonl, one object a line.")
    value = _parse_json(text, str(path))
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    yield from _numbered(path, value if isinstance(value, list) else [value])


def _numbered(path: Path, values: Iterable[Any]) -> Iterator[Row]:
    for number, value in enumerate(values, 1):
        yield Row(f"{path}, row {number}", value)


def _parse_json(text: str, where: str) -> Any:
    nested = text.count("[") + text.count("{")
    if len(text) > MOST_VALUES and nested + text.count(",") > MOST_VALUES:
        raise ConfigError(f"{where} may hold more than {MOST_VALUES:,} values; split it into several rows or files.")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error.msg} at character {error.pos}.") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
        raise ConfigError(f"{where} cannot be read as JSON: {error}.") from None
    if nested > MOST_DEPTH and _is_deep(value):
        raise ConfigError(f"{where} cannot be read as JSON: its values are nested more than {MOST_DEPTH} levels deep.")
    return value


def _is_deep(value: Any) -> bool:
    """Whether a JSON value has more than `MOST_DEPTH` levels, at which printing or copying it could fail."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        parts = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(MOST_LINE)
    with _open(path) as file:
        reader = csv.DictReader(_bounded_lines(file, path), strict=True)
        try:
            yield from _numbered(path, reader)
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.reader.line_num} is no CSV: {error}.") from None


def _bounded_lines(file: IO[str], path: Path) -> Iterator[str]:
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        _require_length(len(line), f"{path}, line {number}")
        yield line


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _open_bytes(path) as file, tempfile.TemporaryFile() as unpacked:
            if (
                path.suffix == ".gz"
            ):  # the reader goes back and forth in the file, which gzip can only do from its start
                shutil.copyfileobj(file, unpacked)
                unpacked.seek(0)
            content = unpacked if path.suffix == ".gz" else file
            batches = pyarrow.parquet.ParquetFile(content).iter_batches(batch_size=256)
            yield from _numbered(path, (row for batch in batches for row in batch.to_pylist()))
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # a text or a date that Python cannot hold
        raise ConfigError(f"{path} is no Parquet file: {first_line(error)}.") from None

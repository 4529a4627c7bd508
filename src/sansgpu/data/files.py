"""Streams documents from files in small pieces, so that a large document does not have to fit into memory."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.wording import first_line
from sansgpu.data.conll import DEFAULT_TAG_COLUMN, as_text, conll_rows
from sansgpu.data.rows import ROW_REMEDY, SourceRow, is_text, parquet_class_names, row_text, with_names
from sansgpu.files.reading import require_regular_file

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".conll")
PIECE_CHARS = 1 << 20
# Limits that keep the memory for one row below about one gigabyte, whatever the file contains.
MAX_LINE = 64 << 20  # bytes or characters of a line, and characters of a CSV field
MAX_JSON = 256 << 20  # characters of a .json file, which is parsed in one piece
MAX_VALUES = 8_000_000  # maximum values in one JSON text; Python needs up to 100 bytes for each
MAX_COLUMNS = 1_000_000  # largest number of columns in a table without a header
MAX_DEPTH = 100  # levels of nesting in one row
MAX_EXPANSION, FREE_EXPANSION = 200, 64 << 20  # maximum size / compressed size, applied beyond this many bytes

CONVERT = f"save the data as one of {' '.join(SUFFIXES)}, each also with .gz"
UNREADABLE = (OSError, EOFError, zlib.error)  # raised for damaged files
Header = bool | Sequence[str]  # True: the first line has the column names; False: there are none; or the names


class Piece(NamedTuple):
    """A part of a document. Concatenating the pieces of a document gives exactly its text."""

    text: str
    ends_document: bool


def file_form(path: Path) -> str | None:
    """Returns the file name's suffix without .gz, or None if the format is not supported."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in SUFFIXES else None


def pieces(text: str) -> Iterator[Piece]:
    """Splits a document at line ends, so that no word is cut."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
        stop = cut if cut > start else start + PIECE_CHARS
        yield Piece(text[start:stop], False)
        start = stop
    if start < len(text):
        yield Piece(text[start:], True)


def read_documents(
    path: Path, column: str | int | None, skip_undecodable: bool = False, header: bool = True
) -> Iterator[Piece]:
    """Yields the documents of one file in pieces: a .txt, .md or .py file is one document, others have one per row.

    Raises ConfigError if the content does not match the suffix. `skip_undecodable` skips files that are not UTF-8.
    """
    require_regular_file(path)
    try:
        if file_form(path) in TEXT_SUFFIXES:
            yield from _read_text(path)
        elif file_form(path) == ".conll":
            yield from _row_documents(map(as_text, _rows(path, header)), column)
        else:
            yield from _row_documents(_rows(path, header), column)
    except UnicodeDecodeError as error:
        if not skip_undecodable:
            raise _undecodable(path, error) from None
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def read_rows(path: Path, header: Header = True, tag_column: int | None = None) -> Iterator[SourceRow]:
    """Yields the rows of one file; an unreadable line of a .jsonl or .tsv file is a row with a `problem`.

    `header` applies to .csv and .tsv files: if it is False, the column names are numbers from 0; if it is a sequence,
    it gives the names. With a `tag_column` the file is read as CoNLL, whatever its suffix. Raises ConfigError if the
    file is plain text or its content does not match the suffix.
    """
    require_regular_file(path)
    if tag_column is not None:
        yield from conll_rows(read_lines(path, blank=True), tag_column)
        return
    if file_form(path) in TEXT_SUFFIXES:
        raise ConfigError(f"{path} is plain text and has no rows; use a .jsonl, .json, .csv, .tsv or .parquet file.")
    try:
        yield from _rows(path, header)
    except UnicodeDecodeError as error:
        raise _undecodable(path, error) from None
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def text_file_rows(path: Path, label: str | None, column: str | int) -> Iterator[SourceRow]:
    """Yields one row with the text of a file in `column` and its label. If `label` is None, each line is a row.

    A file or line that is not UTF-8 text is a row with a `problem`.
    """
    if label is None:
        for line in read_lines(path):
            yield line if line.problem else line._replace(value={column: line.value.rstrip("\r\n")})
        return
    text = ""
    try:
        for piece in read_documents(path, None):
            text += piece.text
            _require_length(len(text), str(path))
    except ConfigError as error:
        yield SourceRow(str(path), None, str(error))
    else:
        yield SourceRow(str(path), {column: text, "label": label})


def read_lines(path: Path, blank: bool = False) -> Iterator[SourceRow]:
    """Yields the lines of a file, split at "\\n" only; a line that is not UTF-8 text has a `problem`.

    Skips lines with only white space unless `blank`. Raises ConfigError if a line is longer than `MAX_LINE` bytes or
    the file cannot be read.
    """
    try:
        with _open_bytes(path) as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                where = f"{path}, line {number}"
                _require_length(len(line), where)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    yield SourceRow(
                        where, None, f"{where} is not UTF-8 text (byte 0x{line[error.start]:02x}){ROW_REMEDY}"
                    )
                    continue
                if "\0" in text:
                    yield SourceRow(where, None, f"{where} is not text (it contains a NUL byte){ROW_REMEDY}")
                elif blank or text.strip():
                    yield SourceRow(where, text)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def _require_length(length: int, where: str) -> None:
    if length > MAX_LINE:
        raise ConfigError(f"{where} is longer than {MAX_LINE >> 20} MB; split it into several rows.")


def _binary(path: Path) -> ConfigError:
    return ConfigError(f"{path} is a binary file (it contains NUL bytes); remove it from the dataset.")


def _undecodable(path: Path, error: UnicodeDecodeError) -> ConfigError:
    """Returns the error for a text file that is not UTF-8. Reads the file again to find the line."""
    where = next((row.where for row in read_lines(path) if row.problem), path)
    return ConfigError(
        f"{where} is not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert or remove the file."
    )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error}; check that the file is complete and that you may read it.")


def _rows(path: Path, header: Header) -> Iterator[SourceRow]:
    match file_form(path):
        case ".jsonl":
            yield from _jsonl_rows(path)
        case ".json":
            yield from _json_rows(path)
        case ".csv" if not _has_tabs(path):
            yield from _csv_rows(path, header)
        case ".csv" | ".tsv":
            yield from _tsv_rows(path, header)
        case ".parquet":
            yield from _parquet_rows(path)
        case ".conll":
            yield from conll_rows(read_lines(path, blank=True), DEFAULT_TAG_COLUMN)


class _BoundedGzip(io.RawIOBase):
    """Decompresses a .gz file, up to `MAX_EXPANSION` times its compressed size."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, gzip.open(path)  # noqa: SIM115  `close` closes it
        self._left = max(FREE_EXPANSION, MAX_EXPANSION * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise ConfigError(
                f"{self._path} decompresses to more than {MAX_EXPANSION} times its size, like a decompression bomb; "
                "decompress it yourself if you trust it."
            )
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_bytes(path: Path) -> IO[bytes]:
    return io.BufferedReader(_BoundedGzip(path), PIECE_CHARS) if path.suffix == ".gz" else path.open("rb")


def _open(path: Path) -> IO[str]:
    """Opens a UTF-8 text file without newline translation."""
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", newline="")


def _read_text(path: Path) -> Iterator[Piece]:
    """Yields the pieces of one document, each one late, because the last one must be marked."""
    rest = ""
    with _open(path) as file:
        while block := file.read(PIECE_CHARS):
            if "\0" in block:
                raise _binary(path)
            *complete, last = pieces(rest + block)
            yield from complete
            rest = last.text
    if rest:
        yield Piece(rest, True)


def _row_documents(rows: Iterator[SourceRow], column: str | int | None) -> Iterator[Piece]:
    for where, row, problem in rows:
        if problem:
            raise ConfigError(problem)
        if not isinstance(row, (str, dict)):
            raise ConfigError(
                f"{where} is of type {type(row).__name__} instead of an object with a text column; fix or remove the "
                "row."
            )
        text = row if isinstance(row, str) else row_text(row, column, where)
        if not is_text(text):
            raise ConfigError(f"{where} contains an unpaired surrogate, which is not valid text{ROW_REMEDY}")
        yield from pieces(text)


def _jsonl_rows(path: Path) -> Iterator[SourceRow]:
    for line in read_lines(path):
        if line.problem:
            yield line
            continue
        try:
            yield SourceRow(line.where, _parse_json(line.value, line.where))
        except ConfigError as error:
            yield SourceRow(line.where, None, str(error))


def _json_rows(path: Path) -> Iterator[SourceRow]:
    with _open(path) as file:
        text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise ConfigError(
            f"{path} is too large for a single JSON value; convert it to .jsonl with one object per line."
        )
    value = _parse_json(text, str(path))
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    yield from _numbered(path, value if isinstance(value, list) else [value])


def _numbered(path: Path, values: Iterable[Any]) -> Iterator[SourceRow]:
    for number, value in enumerate(values, 1):
        yield SourceRow(f"{path}, row {number}", value)


def _parse_json(text: str, where: str) -> Any:
    nested = text.count("[") + text.count("{")
    if len(text) > MAX_VALUES and nested + text.count(",") > MAX_VALUES:
        raise ConfigError(f"{where} may have more than {MAX_VALUES:,} values; split it into several rows or files.")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not valid JSON: {error.msg} at character {error.pos}{ROW_REMEDY}") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        raise ConfigError(f"{where} cannot be read as JSON: {error}{ROW_REMEDY}") from None
    if nested > MAX_DEPTH and _is_deep(value):
        raise ConfigError(
            f"{where} cannot be read as JSON: its values are nested more than {MAX_DEPTH} levels deep{ROW_REMEDY}"
        )
    return value


def _is_deep(value: Any) -> bool:
    """Returns whether a JSON value has more than `MAX_DEPTH` levels, which could make printing or copying it fail."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def _has_tabs(path: Path) -> bool:
    """Returns whether the first line contains a tab. Some .csv files, such as STS-B, are separated by tabs."""
    with _open_bytes(path) as file:
        return b"\t" in file.readline(MAX_LINE)


def _csv_rows(path: Path, header: Header) -> Iterator[SourceRow]:
    csv.field_size_limit(MAX_LINE)
    with _open(path) as file:
        reader = csv.reader(_bounded_lines(file, path), strict=True)
        try:
            records = (fields for fields in reader if fields)
            columns = next(records, []) if header is True else _given_names(header)
            yield from _numbered(path, (_by_column(fields, columns, path) for fields in records))
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num} is not valid CSV: {error}{ROW_REMEDY}") from None


def _tsv_rows(path: Path, header: Header) -> Iterator[SourceRow]:
    """Yields the rows of a tab-separated table without quoting. Drops fields beyond the header's columns."""
    lines = read_lines(path)
    first = next(lines, None) if header is True else None
    columns = _tsv_fields(first.readable_value()) if first else _given_names(header)
    for line in lines:
        if line.problem:
            yield line
            continue
        fields = _tsv_fields(line.value)
        problem = None
        if columns is not None and len(fields) < len(columns):
            problem = (
                f"{line.where} has {len(fields)} columns, but the header has {len(columns)}; fix or remove the line."
            )
        yield SourceRow(line.where, _by_column(fields, columns, line.where), problem)


def _given_names(header: Header) -> Sequence[str] | None:
    return None if isinstance(header, bool) else header


def _tsv_fields(line: str) -> list[str]:
    return line.removesuffix("\n").removesuffix("\r").split("\t")


def _by_column(fields: list[str], columns: Sequence[str] | None, where: object) -> dict[Any, str | None]:
    """Maps column names to fields; missing last fields are None. Without `columns`, the keys are column numbers."""
    if columns is None:
        if len(fields) > MAX_COLUMNS:
            raise ConfigError(f"{where} has more than {MAX_COLUMNS:,} columns; remove unneeded ones.")
        return dict(enumerate(fields))
    return dict(itertools.zip_longest(columns, fields[: len(columns)]))


def _bounded_lines(file: IO[str], path: Path) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        _require_length(len(line), f"{path}, line {number}")
        if "\0" in line:
            raise _binary(path)
        yield line


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    require(f"{path}: reading Parquet", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        with _open_bytes(path) as file, tempfile.TemporaryFile() as unpacked:
            if path.suffix == ".gz":  # the Parquet reader needs random access, which gzip streams do not offer
                shutil.copyfileobj(file, unpacked)
                unpacked.seek(0)
            content = unpacked if path.suffix == ".gz" else file
            table = pyarrow.parquet.ParquetFile(content)
            names = parquet_class_names(table.schema_arrow.metadata)
            rows = (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist())
            yield from _numbered(path, (with_names(row, names) for row in rows))
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: invalid text or dates
        raise ConfigError(
            f"{path} is not a valid Parquet file: {first_line(error)}; download or export it again."
        ) from None

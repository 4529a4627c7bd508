"""Files -> documents, in pieces small enough that no document is ever whole in memory."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from sansgpu.config import ConfigError

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".json", ".csv", ".parquet")
PIECE_CHARS = 1 << 20
MAX_JSON_BYTES = 256 << 20  # a .json is parsed whole, at several times its size in memory


class Row(NamedTuple):
    """One row of a file or dataset; `problem` says why its value cannot be read."""

    where: str
    value: Any
    problem: str | None = None


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
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


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
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def _undecodable(path: Path, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(
        f"{path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert it or leave it out."
    )


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


def row_text(row: dict[str, Any], column: str | None, where: str) -> str:
    """The text of one row: of `column`, else of `text`, `content` or the only column of strings."""
    if column is None:
        named = [name for name in ("text", "content") if name in row]
        strings = [name for name, value in row.items() if isinstance(value, str)]
        if not named and len(strings) != 1:
            raise ConfigError(
                f"{where} has the columns {', '.join(map(str, row))}; set data.text_column to the text's."
            )
        column = (named or strings)[0]
    if column not in row:
        raise ConfigError(f"{where} has no column {column}, only {', '.join(map(str, row))}; set data.text_column.")
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: column {column} holds a {type(text).__name__}, not text; set data.text_column.")
    return text


def _open(path: Path, newline: str | None = "") -> IO[str]:
    """Text to the character: no newline is translated."""
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8-sig", newline=newline))
    return path.open(encoding="utf-8-sig", newline=newline)


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
    with _open(path, newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    yield Row(where, _parse_json(line, where))
                except ConfigError as error:
                    yield Row(where, None, str(error))


def _json_rows(path: Path) -> Iterator[Row]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(f"{path} is too large to parse whole; convert it to .jsonl, one object a line.")
    with _open(path) as file:
        value = _parse_json(file.read(), str(path))
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    yield from _numbered(path, value if isinstance(value, list) else [value])


def _numbered(path: Path, values: Iterable[Any]) -> Iterator[Row]:
    for number, value in enumerate(values, 1):
        yield Row(f"{path}, row {number}", value)


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error.msg} at character {error.pos}.") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
        raise ConfigError(f"{where} cannot be read as JSON: {error}.") from None


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        try:
            yield from _numbered(path, csv.DictReader(file, strict=True))
        except csv.Error as error:
            raise ConfigError(f"{path} is no CSV: {error}.") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=256)
            yield from _numbered(path, (row for batch in batches for row in batch.to_pylist()))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no Parquet file: {str(error).splitlines()[0]}") from None

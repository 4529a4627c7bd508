"""Files -> documents, in pieces small enough that no document is ever whole in memory."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from sansgpu.config import ConfigError

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".json", ".csv", ".parquet")
PIECE_CHARS = 1 << 20
MAX_JSON_BYTES = 256 << 20  # a .json is parsed whole, at several times its size in memory


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
        match file_form(path):
            case ".txt" | ".md" | ".py":
                yield from _read_text(path)
            case ".jsonl":
                yield from _read_rows(_jsonl_rows(path), column, path)
            case ".json":
                yield from _read_rows(_json_rows(path), column, path)
            case ".csv":
                yield from _read_rows(_csv_rows(path), column, path)
            case ".parquet":
                yield from _read_rows(_parquet_rows(path), column, path)
    except UnicodeDecodeError as error:
        if not skip_undecodable:
            raise ConfigError(
                f"{path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert it or leave it out."
            ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


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


def _read_rows(rows: Iterator[tuple[int, Any]], column: str | None, path: Path) -> Iterator[Piece]:
    for number, row in rows:
        where = f"{path}, row {number}"
        if not isinstance(row, (str, dict)):
            raise ConfigError(f"{where} is a {type(row).__name__}, not an object with a text.")
        text = row if isinstance(row, str) else row_text(row, column, where)
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can write half a surrogate pair, which no UTF-8 text can hold
            raise ConfigError(f"{where} holds half a surrogate pair, which is no text; mend or drop the row.") from None
        yield from pieces(text)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with _open(path, newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parse_json(line, f"{path}, line {number}")


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(f"{path} is too large to parse whole; convert it to .jsonl, one object a line.")
    with _open(path) as file:
        value = _parse_json(file.read(), str(path))
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error.msg} at character {error.pos}.") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
        raise ConfigError(f"{where} cannot be read as JSON: {error}.") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        try:
            yield from enumerate(csv.DictReader(file, strict=True), 1)
        except csv.Error as error:
            raise ConfigError(f"{path} is no CSV: {error}.") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no Parquet file: {str(error).splitlines()[0]}") from None

"""Reads the lines of text files with limits on memory, and explains why a file cannot be read."""

from __future__ import annotations

import codecs
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sansgpu.config import ConfigError
from sansgpu.data.formats.encodings import AUTO, UTF8, open_utf8, resolve_encoding
from sansgpu.data.formats.opening import MAX_LINE
from sansgpu.data.rows import SourceRow
from sansgpu.files.reading import require_regular_file

# Ends the message about text that cannot be decoded.
ENCODING_REMEDY = "; fix or remove the row, or set data.encoding to the encoding of the file."


def open_text(path: Path, encoding: str = AUTO, errors: str = "strict") -> IO[str]:
    """Opens a text file without newline translation."""
    return io.TextIOWrapper(open_utf8(path, encoding), encoding="utf-8-sig", errors=errors, newline="")


@contextmanager
def reading_file(path: Path, skip_undecodable: bool = False, encoding: str = AUTO) -> Iterator[None]:
    """Context that reads a file; converts exceptions for damaged files, and undecodable text, to ConfigError.

    `skip_undecodable` ignores the rest of a file that is not UTF-8. Raises ConfigError at once for pipes and devices.
    """
    require_regular_file(path)
    try:
        yield
    except UnicodeDecodeError:
        if not skip_undecodable:
            row = next((row for row in read_lines(path, encoding=encoding) if row.problem), None)
            reason = f"{path} is not {encoding_name(path, encoding)} text" if row is None else row.problem
            raise ConfigError(f"{str(reason).removesuffix(ENCODING_REMEDY)}{ENCODING_REMEDY}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; check that the file is complete and that you may read it."
        ) from None


def encoding_name(path: Path, encoding: str = AUTO) -> str:
    """Returns the encoding of a file for messages."""
    resolved = resolve_encoding(path, encoding)
    return "UTF-8" if resolved == UTF8 else resolved


def undecodable(where: str, encoding: str, byte: int) -> str:
    """Returns the message about a line that cannot be decoded at a byte."""
    found = f" (byte 0x{byte:02x})" if encoding == "UTF-8" else ""
    return f"{where} is not {encoding} text{found}{ENCODING_REMEDY}"


def read_lines(path: Path, blank: bool = False, encoding: str = AUTO) -> Iterator[SourceRow]:
    """Yields the lines of a file, split at "\\n" only; a line that is not text has a `problem`.

    Skips lines with only white space unless `blank`. Raises ConfigError if a line is longer than `MAX_LINE` bytes or
    the file cannot be read.
    """
    with reading_file(path, encoding=encoding), open_utf8(path, encoding) as file:
        number, prefix = 0, f"{path}, line "
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{prefix}{number}"
            require_length(len(line), where)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                problem = undecodable(where, encoding_name(path, encoding), line[error.start])
                yield SourceRow(where, None, problem)
                continue
            if "\0" in text:
                problem = f"{where} is not text (it contains a NUL byte){ENCODING_REMEDY}"
                yield SourceRow(where, None, problem)
            elif blank or not text.isspace():
                yield SourceRow(where, text)


def require_length(length: int, where: str) -> None:
    if length > MAX_LINE:
        raise ConfigError(f"{where} is longer than {MAX_LINE >> 20} MB; split it into several rows.")


def binary_file(path: Path) -> ConfigError:
    return ConfigError(f"{path} is a binary file (it contains NUL bytes); remove it from the dataset.")

"""Opens files, which may be compressed, and reads their lines with limits on memory."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sansgpu.config import ConfigError
from sansgpu.data.rows import ROW_REMEDY, SourceRow
from sansgpu.files.reading import require_regular_file

BLOCK = 1 << 20  # bytes or characters to read at a time
# Limits that keep the memory for one row below about one gigabyte, whatever the file contains.
MAX_LINE = 64 << 20  # bytes or characters of a line, and characters of a CSV field
MAX_EXPANSION, FREE_EXPANSION = 200, 64 << 20  # maximum size / compressed size, applied beyond this many bytes


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


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file's name without .gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def open_bytes(path: Path) -> IO[bytes]:
    return io.BufferedReader(_BoundedGzip(path), BLOCK) if path.suffix == ".gz" else path.open("rb")


def open_text(path: Path) -> IO[str]:
    """Opens a UTF-8 text file without newline translation."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


@contextmanager
def reading_file(path: Path, skip_undecodable: bool = False) -> Iterator[None]:
    """Context that reads a file; converts exceptions for damaged files, and text that is not UTF-8, to ConfigError.

    `skip_undecodable` ignores the rest of a file that is not UTF-8. Raises ConfigError at once for pipes and devices.
    """
    require_regular_file(path)
    try:
        yield
    except UnicodeDecodeError as error:
        if not skip_undecodable:
            where = next((row.where for row in read_lines(path) if row.problem), path)
            byte = error.object[error.start]
            raise ConfigError(f"{where} is not UTF-8 text (byte 0x{byte:02x}); convert or remove the file.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; check that the file is complete and that you may read it."
        ) from None


def read_lines(path: Path, blank: bool = False) -> Iterator[SourceRow]:
    """Yields the lines of a file, split at "\\n" only; a line that is not UTF-8 text has a `problem`.

    Skips lines with only white space unless `blank`. Raises ConfigError if a line is longer than `MAX_LINE` bytes or
    the file cannot be read.
    """
    with reading_file(path), open_bytes(path) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{path}, line {number}"
            require_length(len(line), where)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                problem = f"{where} is not UTF-8 text (byte 0x{line[error.start]:02x}){ROW_REMEDY}"
                yield SourceRow(where, None, problem)
                continue
            if "\0" in text:
                yield SourceRow(where, None, f"{where} is not text (it contains a NUL byte){ROW_REMEDY}")
            elif blank or text.strip():
                yield SourceRow(where, text)


def require_length(length: int, where: str) -> None:
    if length > MAX_LINE:
        raise ConfigError(f"{where} is longer than {MAX_LINE >> 20} MB; split it into several rows.")


def binary_file(path: Path) -> ConfigError:
    return ConfigError(f"{path} is a binary file (it contains NUL bytes); remove it from the dataset.")

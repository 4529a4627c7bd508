"""Opens files as bytes: plain, compressed, or inside a .zip archive, with limits on the size of their content.

A file inside an archive has a path like `data.zip/train.csv`.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.machine.disk import file_sha256

BLOCK = 1 << 20  # bytes or characters to read at a time
# Limits that keep the memory for one row below about one gigabyte, whatever the file contains.
MAX_LINE = 64 << 20  # bytes or characters of a line, and characters of a CSV field
MAX_EXPANSION, FREE_EXPANSION = 200, 64 << 20  # maximum size / compressed size, applied beyond this many bytes
REMEMBERED_BYTES = 64 << 20  # a process hashes an unchanged file of this size once
MAX_MEMBERS = 1000  # files in an archive, whose directory is read again for each of them
ARCHIVE = ".zip"


def _open_zstandard(file: IO[bytes], path: Path) -> Any:
    require(f"{path}: reading .zst", "zstandard")
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


_DECOMPRESS: dict[str, Callable[[IO[bytes], Path], Any]] = {
    ".gz": lambda file, path: gzip.GzipFile(fileobj=file),
    ".bz2": lambda file, path: bz2.BZ2File(file),
    ".xz": lambda file, path: lzma.LZMAFile(file),  # noqa: SIM115  `_Bounded` closes it
    ".zst": _open_zstandard,
}
COMPRESSIONS = tuple(_DECOMPRESS)


class _Bounded(io.RawIOBase):
    """Reads a decompressed stream, up to `MAX_EXPANSION` times its compressed size."""

    def __init__(self, path: Path, stream: Any, file: IO[bytes], compressed_size: int) -> None:
        self._path, self._stream, self._file = path, stream, file
        self._left = max(FREE_EXPANSION, MAX_EXPANSION * compressed_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._stream.readinto(buffer)
        except (OSError, EOFError, ConfigError):
            raise
        except Exception as error:  # each compression has errors of its own
            raise OSError(str(error)) from None
        self._left -= count
        if self._left < 0:
            raise ConfigError(
                f"{self._path} decompresses to more than {MAX_EXPANSION} times its size, like a decompression bomb; "
                "decompress it yourself if you trust it."
            )
        return count

    def close(self) -> None:
        self._stream.close()
        self._file.close()
        super().close()


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file's name in lower case, without that of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS


def is_archive(path: Path) -> bool:
    return path.suffix.lower() == ARCHIVE


def archive_of(path: Path) -> Path | None:
    """Returns the archive that contains the file with this path, or None if it is a file of its own."""
    return next((folder for folder in path.parents if is_archive(folder) and folder.is_file()), None)


def open_bytes(path: Path) -> IO[bytes]:
    """Opens a file and decompresses it. Raises ConfigError if it expands like a decompression bomb, and OSError."""
    archive = archive_of(path)
    file: IO[bytes]
    if archive is None:
        file, size = path.open("rb"), path.stat().st_size
    else:
        file, size = _open_member(path, archive)
    if not is_compressed(path):
        return file
    try:
        stream = _DECOMPRESS[path.suffix.lower()](file, path)
    except ConfigError:
        file.close()
        raise
    return io.BufferedReader(_Bounded(path, stream, file, size), BLOCK)


@contextmanager
def open_seekable(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for random access, which compressed streams do not offer; those are copied to the disk."""
    with open_bytes(path) as file:
        if not is_compressed(path) and archive_of(path) is None:
            yield file
            return
        with tempfile.TemporaryFile() as unpacked:
            while block := file.read(BLOCK):
                unpacked.write(block)
            unpacked.seek(0)
            yield unpacked


def size_of(path: Path) -> int:
    """Returns the size of a file on the disk or in its archive, in bytes."""
    archive = archive_of(path)
    return path.stat().st_size if archive is None else _member(path, archive).file_size


def sha256_of(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file, as it is on the disk or in its archive."""
    archive = archive_of(path)
    if archive is None:
        stat = path.stat()
        if stat.st_size < REMEMBERED_BYTES:
            return file_sha256(path)
        return _remembered_sha256(path, (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    digest = hashlib.sha256()
    with _open_member(path, archive)[0] as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


@lru_cache(maxsize=64)
def _remembered_sha256(path: Path, state: tuple[int, ...]) -> str:
    return file_sha256(path)


def archived_files(archive: Path) -> list[Path]:
    """Returns the paths of the files in an archive, sorted, except hidden ones. Raises ConfigError if it is damaged."""
    with _reading_archive(archive), zipfile.ZipFile(archive) as content:
        members = [member for member in content.infolist() if not member.is_dir()]
    if len(members) > MAX_MEMBERS:
        raise ConfigError(f"{archive} has more than {MAX_MEMBERS:,} files; extract it, and pass the folder.")
    if sum(member.compress_size for member in members) > archive.stat().st_size:
        raise ConfigError(f"{archive} has files that overlap, like a decompression bomb; pack it again.")
    names = [member.filename for member in members]
    if unsafe := next((name for name in names if name.startswith("/") or ".." in Path(name).parts), None):
        raise ConfigError(f"{archive} has a file outside its own folder ({unsafe!r}); pack it again.")
    return sorted(archive / name for name in names if not _is_hidden(Path(name)))


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.parts)


def _member(path: Path, archive: Path) -> zipfile.ZipInfo:
    with _reading_archive(archive), zipfile.ZipFile(archive) as content:
        return content.getinfo(path.relative_to(archive).as_posix())


def _open_member(path: Path, archive: Path) -> tuple[IO[bytes], int]:
    with _reading_archive(archive), zipfile.ZipFile(archive) as content:
        member = content.getinfo(path.relative_to(archive).as_posix())
        file = content.open(member)
    return io.BufferedReader(_Bounded(path, file, file, member.compress_size), BLOCK), member.compress_size


@contextmanager
def _reading_archive(archive: Path) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise FileNotFoundError(error.args[0]) from None
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"{archive} cannot be read as a .zip archive ({error}); extract it, and pass the folder."
        ) from None

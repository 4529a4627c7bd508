"""Opens the files of documents, which may be compressed with gzip."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from sansgpu.data.documents.document import UnreadableError

MAX_UNPACKED = 512 << 20  # bytes of a compressed file, which is unpacked in memory


def is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def open_content(path: Path) -> BinaryIO:
    """Opens a file at its beginning. Raises UnreadableError if it is compressed and damaged or too large."""
    if not is_packed(path):
        return path.open("rb")
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_UNPACKED + 1)
    except (OSError, EOFError, zlib.error):
        raise UnreadableError("is not a valid gzip file; compress or download it again") from None
    if len(content) > MAX_UNPACKED:
        raise UnreadableError(
            f"decompresses to more than {MAX_UNPACKED >> 20} MB; decompress it yourself if you trust it"
        )
    return cast(BinaryIO, io.BufferedReader(io.BytesIO(content)))


def read_content(path: Path, most: int, remedy: str) -> bytes:
    """Returns the content of a file of at most `most` bytes. Raises UnreadableError."""
    with open_content(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnreadableError(f"has more than {most >> 20} MB; {remedy}")
    return content

"""Reads a document in a child process with bounded time and memory, and caches its text.

Documents are untrusted: libraries may hang or crash on them, and archives may unpack to any size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.plain_data import unreadable
from sansgpu.config.wording import counted, first_line
from sansgpu.data.documents.document import Document, DocumentPart, UnreadableError
from sansgpu.data.documents.formats import Format, format_of
from sansgpu.files.atomic import PRIVATE_MODE, atomic_write, make_folder
from sansgpu.files.reading import require_regular_file
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.disk import file_sha256
from sansgpu.machine.untrusted.sandbox import Sandbox, SandboxError

CPU_SECONDS = 60  # time limit of a file; a page of a PDF file takes 5 to 20 milliseconds
MAX_CHARS = 64 << 20  # characters of a file, which are held in memory


def read_document(path: Path) -> Document:
    """Returns the text of a document. Raises ConfigError with the reason and the remedy if it cannot be read."""
    kind = format_of(path)
    assert kind is not None
    require_regular_file(path)
    if kind.package is not None:
        require(f"{path}: reading {kind.name}", kind.package)
    answer = _read(path, kind)
    if "problem" in answer:
        raise ConfigError(f"{path} {answer['problem']}.")
    return _document(answer)


def _read(path: Path, kind: Format) -> Mapping[str, Any]:
    """Returns the fields of a document or its "problem", from the cache if the file was read before."""
    try:
        content = file_sha256(path)
    except OSError as error:
        raise unreadable(path, error) from None
    key = hashlib.sha256(repr((kind.version(), path.suffix.lower(), content)).encode()).hexdigest()
    file = cache_dir(None) / "documents" / f"{key}.json"
    with suppress(OSError, ValueError):
        cached: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return cached
    try:
        text = _READER.call(os.fsencode(path.absolute())).decode()
    except SandboxError as error:
        text = json.dumps({"problem": f"{error}; remove it or split it"})
    with suppress(OSError):  # a cache that cannot be written only costs time
        make_folder(file.parent, PRIVATE_MODE)
        with atomic_write(file) as partial:
            partial.write_text(text, encoding="utf-8")
    answer: dict[str, Any] = json.loads(text)
    return answer


def _document(answer: Mapping[str, Any]) -> Document:
    parts = [DocumentPart(**part) for part in answer["parts"]]
    return Document(**{**answer, "parts": parts})


def _serve(request: bytes) -> bytes:
    """Returns the fields of a document as JSON, or its "problem"."""
    path = Path(os.fsdecode(request))
    kind = format_of(path)
    assert kind is not None
    try:
        document = kind.read(path)
        size = sum(len(part.text) for part in document.parts)
        if size > MAX_CHARS:
            raise UnreadableError(f"has more than {MAX_CHARS >> 20} million characters of text; split it")
        if not size:
            if document.blank:
                pages = counted(document.blank, "page")
                raise UnreadableError(
                    f"has no text on {pages} of scanned images; recognize it first, e.g. with ocrmypdf"
                )
            raise UnreadableError("has no text; remove it")
        answer = asdict(document)
    except UnreadableError as error:
        answer = {"problem": str(error)}
    except ConfigError as error:  # a compressed file that unpacks to too much
        answer = {"problem": str(error).removeprefix(f"{path} ").removesuffix(".")}
    except MemoryError:
        raise
    except Exception as error:  # libraries raise anything on damaged files
        answer = {"problem": f"cannot be read as {kind.name} ({first_line(error)}); save or download it again"}
    return json.dumps(answer).encode()


_READER = Sandbox(_serve, CPU_SECONDS)

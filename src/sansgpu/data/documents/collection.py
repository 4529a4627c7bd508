"""Reads all documents of a dataset before its text is used, and says what of them is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.errors import how_to_install, is_installed
from sansgpu.config.wording import counted
from sansgpu.data.documents.document import Document
from sansgpu.data.documents.formats import format_of
from sansgpu.data.documents.reading import read_document
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.distributed.world import find_world
from sansgpu.machine.interrupt import write_line

MAX_NAMED = 3  # files that a message names


class Collection:
    """Reads documents, and collects what of them is left out."""

    def __init__(self) -> None:
        self._read = 0
        self._missing: dict[Path, str] = {}  # documents whose package is not installed, and the package
        self._problems: dict[Path, str] = {}
        self._scanned: dict[Path, Document] = {}
        self._left_out: Counter[str] = Counter()

    def read(self, path: Path) -> Document | None:
        """Returns the text of a document, or None if it cannot be read."""
        kind = format_of(path)
        assert kind is not None
        if kind.package is not None and not is_installed(kind.package):
            self._missing[path] = kind.package
            return None
        try:
            document = read_document(path)
        except ConfigError as error:
            self._problems[path] = str(error).removesuffix(".")
            return None
        self._read += 1
        self._left_out.update(document.left_out)
        if document.blank:
            self._scanned[path] = document
        return document

    def notes(self) -> list[str]:
        """Returns messages about files, pages and other content that are left out."""
        notes = [*self._of_missing(), *self._of_problems(), *self._of_scanned()]
        if self._left_out:
            names = ", ".join(counted(number, name) for name, number in self._left_out.most_common())
            notes.append(f"not read in documents: {names}")
        return notes

    def refusal(self) -> ConfigError:
        """Returns the error if no document can be read: the only problem, or all messages."""
        notes = self.notes()
        if len(notes) == 1 and len(self._problems) == 1:
            return ConfigError(f"{next(iter(self._problems.values()))}.")
        return ConfigError("; ".join(note.removesuffix(".") for note in notes) + ".")

    def _of_missing(self) -> list[str]:
        if not self._missing:
            return []
        names = sorted({kind.name for path in self._missing if (kind := format_of(path))})
        what = f"{self._count(self._missing)} left out ({_named(self._missing)}): reading {' and '.join(names)}"
        return [how_to_install(what, *sorted(set(self._missing.values())))]

    def _of_problems(self) -> list[str]:
        if not self._problems:
            return []
        reasons = "; ".join(list(self._problems.values())[:MAX_NAMED])
        more = f"; and {len(self._problems) - MAX_NAMED:,} more" if len(self._problems) > MAX_NAMED else ""
        return [f"{self._count(self._problems)} left out: {reasons}{more}"]

    def _of_scanned(self) -> list[str]:
        if not self._scanned:
            return []
        blank = sum(document.blank for document in self._scanned.values())
        pages = sum(document.pages for document in self._scanned.values())
        have, images = ("has", "it is a scanned image") if blank == 1 else ("have", "they are scanned images")
        return [
            f"{blank:,} of {counted(pages, 'page')} {have} no text; {images} ({_named(self._scanned)}); "
            "recognize their text first, e.g. with ocrmypdf"
        ]

    def _count(self, some: Mapping[Path, str]) -> str:
        return f"{len(some):,} of {counted(self._read + len(self._missing) + len(self._problems), 'document')}"


def _named(paths: Iterable[Path]) -> str:
    names = [path.name for path in paths]
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


@cache
def warn_of_left_out(files: frozenset[Path]) -> None:
    """Warns once that documents and text files beside files with rows are left out."""
    if find_world().rank == 0:
        documents = sum(format_of(path) is not None for path in files)
        kinds = {"document": documents, "text file": len(files) - documents}
        named = " and ".join(counted(number, kind) for kind, number in kinds.items() if number)
        write_line(
            f"warning: {named} beside files with rows left out ({_named(sorted(files))}); put "
            f"{'documents' if documents else 'texts'} into a folder of their own to use their text."
        )


class ReadableFiles(NamedTuple):
    """The files that can be read, in order, messages about what is left out, and the size of each document's text.

    The size is in UTF-8 bytes; that of the file is often far larger, because of images.
    """

    files: list[Path]
    notes: list[str]
    sizes: dict[Path, int]


def readable_files(files: Sequence[Path], progress: ReportProgress) -> ReadableFiles:
    """Reads the documents among files, which caches their text, and leaves out those that cannot be read.

    Raises ConfigError if no file is left.
    """
    documents = [path for path in files if format_of(path) is not None]
    collection, sizes = Collection(), dict[Path, int]()
    for number, path in enumerate(documents):
        progress("reading documents", number, len(documents), "file")
        if (document := collection.read(path)) is not None:
            sizes[path] = sum(len(text.encode()) for text in document.texts())
    unread = {path for path in documents if path not in sizes}
    found = [path for path in files if path not in unread]
    if unread and not found:
        raise collection.refusal()
    return ReadableFiles(found, collection.notes(), sizes)

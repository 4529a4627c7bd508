"""The formats of documents, by the suffixes of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sansgpu.data.documents.document import Document

READER = 2  # version of the readers in this folder, part of the key of cached text


class Format(NamedTuple):
    """A format of documents: its name, its reader, and the package that this needs beyond the standard library."""

    name: str
    reader: str  # module and function
    package: str | None = None

    def read(self, path: Path) -> Document:
        """Returns the text of a file. Raises UnreadableError, or any exception of a library."""
        module, name = self.reader.split(":")
        read: Callable[[Path], Document] = getattr(import_module(f"sansgpu.data.documents.{module}"), name)
        return read(path)

    def version(self) -> str:
        """Returns the reader with the versions on which the text of a file depends."""
        package = "" if self.package is None else f" {self.package} {_version(self.package)}"
        return f"{self.reader} {READER}{package}"


_HTML = Format("HTML", "html:read_html")
FORMATS = {
    ".pdf": Format("PDF", "pdf:read_pdf", "pypdfium2"),
    ".docx": Format("Word", "word:read_docx"),
    ".pptx": Format("PowerPoint", "slides:read_pptx"),
    ".odt": Format("OpenDocument", "opendocument:read_odt"),
    ".epub": Format("EPUB", "epub:read_epub"),
    ".html": _HTML,
    ".htm": _HTML,
    ".xhtml": _HTML,
    ".eml": Format("e-mail", "mail:read_eml"),
    ".mbox": Format("mailbox", "mail:read_mbox"),
    ".ipynb": Format("notebook", "notebook:read_ipynb"),
}
DOCUMENT_SUFFIXES = tuple(FORMATS)


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def readers(files: Iterable[Path]) -> list[str]:
    """Returns the versions of the readers of the documents among files, for the fingerprint of their text."""
    return sorted({kind.version() for path in files if (kind := format_of(path))})


def format_of(path: Path) -> Format | None:
    """Returns the format of a document, or None for other files."""
    name = path.name.lower().removesuffix(".gz")
    return next((kind for suffix, kind in FORMATS.items() if name.endswith(suffix)), None)

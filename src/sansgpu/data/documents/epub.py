"""Reads books in the EPUB format: HTML pages in a ZIP archive, in the order of the book's spine."""

from __future__ import annotations

import posixpath
from pathlib import Path

from sansgpu.data.documents.archive import Archive, attribute, children, inside, open_archive
from sansgpu.data.documents.document import Document, UnreadableError, numbered
from sansgpu.data.documents.html import decoded, html_text

_ENCRYPTION = "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "text/html", "application/html")


def read_epub(path: Path) -> Document:
    """Reads the chapters of a book, except its table of contents. Raises UnreadableError."""
    with open_archive(path, "a book in the EPUB format") as archive:
        package = _package(archive)
        root, folder = archive.xml(package), posixpath.dirname(package)
        items = {attribute(item, "id"): item for item in children(root, "manifest", "item")}
        spine = [
            items[name] for entry in children(root, "spine", "itemref") if (name := attribute(entry, "idref")) in items
        ]
        chapters = [
            inside(folder, attribute(item, "href") or "")
            for item in spine
            if attribute(item, "media-type") in _PAGES and "nav" not in (attribute(item, "properties") or "").split()
        ]
        names = [name for name in chapters if name in archive.names]
        if _encrypted(archive) & set(names):
            raise UnreadableError("is protected against copying (DRM); use a copy without it")
        return Document("chapter", numbered([html_text(decoded(archive.read(name))) for name in names]))


def _package(archive: Archive) -> str:
    files = children(archive.xml("META-INF/container.xml"), "rootfiles", "rootfile")
    found = next((name for file in files if (name := attribute(file, "full-path"))), None)
    if found is None:
        raise UnreadableError("names no contents in META-INF/container.xml; download it again")
    return found


def _encrypted(archive: Archive) -> set[str]:
    """Returns the members that are encrypted; often these are only fonts."""
    if _ENCRYPTION not in archive.names:
        return set()
    references = children(archive.xml(_ENCRYPTION), "EncryptedData", "CipherData", "CipherReference")
    return {inside("", attribute(reference, "URI") or "") for reference in references}

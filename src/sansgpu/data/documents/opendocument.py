"""Reads OpenDocument texts (.odt), as LibreOffice and OpenOffice write them. Headers and footers are in styles.xml."""

from __future__ import annotations

from pathlib import Path

from sansgpu.data.documents.archive import Element, attribute, children, local, open_archive
from sansgpu.data.documents.document import Document, UnreadableError
from sansgpu.data.documents.paragraphs import Paragraphs

_LEFT_OUT = {"tracked-changes", "annotation", "sequence-decls", "forms", "note-citation", "table-of-content-source"}
MAX_SPACES = 1000  # of a <text:s>, whose count is any number


def read_odt(path: Path) -> Document:
    """Reads an OpenDocument text. Raises UnreadableError."""
    with open_archive(path, "an OpenDocument text (.odt)") as archive:
        if "META-INF/manifest.xml" in archive.names and b"encryption-data" in archive.read("META-INF/manifest.xml"):
            raise UnreadableError("is encrypted; save it without a password")
        content = archive.xml("content.xml")
        reader = _OpenDocumentReader(content)
        for text in children(content, "body", "text"):
            reader.read(text)
        return reader.paragraphs.document({"image": reader.images} if reader.images else {})


class _OpenDocumentReader:
    def __init__(self, content: Element) -> None:
        self.paragraphs = Paragraphs()
        self.images = 0
        self._notes: list[Element] = []
        # Automatic page breaks are stored only on request; without them the breaks of styles tell no page number.
        has_pages = any(attribute(text, "use-soft-page-breaks") == "true" for text in children(content, "body", "text"))
        self._breaking = (
            {
                attribute(style, "name")
                for style in children(content, "automatic-styles", "style")
                if any(attribute(part, "break-before") == "page" for part in style)
                or attribute(style, "master-page-name")
            }
            if has_pages
            else set()
        )

    def read(self, element: Element, prefix: str = "") -> None:
        """Adds the text of an element and of all in it."""
        name = local(element)
        if name in ("p", "h"):
            if attribute(element, "style-name") in self._breaking:
                self.paragraphs.begin_page()
            self._read_words(element)
            self.paragraphs.end_item(prefix) if prefix else self.paragraphs.end_paragraph()
            notes, self._notes = self._notes, []
            for note in notes:
                self.read(note)
        elif name == "soft-page-break":
            self.paragraphs.begin_page()
        elif name == "table-row":
            self._read_row(element)
        elif name not in _LEFT_OUT:
            for child in element:
                self.read(child, "- " if name == "list-item" else prefix)

    def _read_words(self, element: Element) -> None:
        name, add = local(element), self.paragraphs.add
        if name == "s":
            count = attribute(element, "c") or "1"
            add(" " * min(int(count), MAX_SPACES) if count.isdigit() else " ")
        elif name in ("tab", "line-break"):
            add("\t" if name == "tab" else "\n")
        elif name == "soft-page-break":
            self.paragraphs.begin_page()
        elif name == "note":
            self._notes += children(element, "note-body")
        elif name in ("text-box", "table"):
            self._notes.append(element)
        elif name not in _LEFT_OUT:
            self.images += name == "image"
            add(element.text or "")
            for child in element:
                self._read_words(child)
                add(child.tail or "")

    def _read_row(self, row: Element) -> None:
        cells = []
        for cell in children(row, "table-cell"):
            before = self.paragraphs
            self.paragraphs = Paragraphs()
            for child in cell:
                self.read(child)
            cells.append(" ".join(part.text for part in self.paragraphs.document().parts))
            self.paragraphs = before
        self.paragraphs.add("\t".join(cells).rstrip("\t"))
        self.paragraphs.end_item()

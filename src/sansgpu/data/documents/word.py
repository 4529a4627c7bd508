"""Reads Word files (.docx): WordprocessingML in a ZIP archive. Headers and footers are in members of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sansgpu.data.documents.archive import Archive, Element, attribute, children, local, open_archive
from sansgpu.data.documents.document import Document
from sansgpu.data.documents.paragraphs import Paragraphs

# Deleted text, the fields' instructions, the second form of a text box, and properties.
_LEFT_OUT = {"del", "moveFrom", "instrText", "delText", "Fallback", "pPr", "rPr", "tblPr", "tcPr", "trPr", "sectPr"}
_SPACES = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_IMAGES = {"drawing", "pict"}


def read_docx(path: Path) -> Document:
    """Reads a Word file: its text, then its footnotes and endnotes. Raises UnreadableError."""
    with open_archive(path, "a Word file (.docx)") as archive:
        main = next(
            (name for kind, name in archive.targets("").values() if kind == "officeDocument"), "word/document.xml"
        )
        reader = _WordReader()
        reader.read(archive.xml(main))
        for notes in _notes(archive, main):
            for note in notes:
                if attribute(note, "type") in (None, "normal"):  # others are separators
                    reader.read(note)
        return reader.paragraphs.document({"image": reader.images} if reader.images else {})


def _notes(archive: Archive, main: str) -> list[Element]:
    kinds = ("footnotes", "endnotes")
    return [
        archive.xml(name) for kind, name in archive.targets(main).values() if kind in kinds and name in archive.names
    ]


class _WordReader:
    def __init__(self) -> None:
        self.paragraphs = Paragraphs()
        self.images = 0

    def read(self, element: Element) -> None:
        """Adds the text of an element and of all in it."""
        name = local(element)
        if name == "t":
            self.paragraphs.add(element.text or "")
        elif name == "lastRenderedPageBreak":  # written by Word; breaks that authors insert are among these
            self.paragraphs.begin_page()
        elif name in _SPACES:
            self.paragraphs.add(_SPACES[name])
        elif name == "tr":
            self._read_row(element)
        elif name not in _LEFT_OUT:
            self.images += name in _IMAGES and not any(local(part) == "txbxContent" for part in element.iter())
            for child in element:
                self.read(child)
            if name == "p":
                is_item = next(children(element, "pPr", "numPr"), None) is not None
                self.paragraphs.end_item("- ") if is_item else self.paragraphs.end_paragraph()

    def _read_row(self, row: Element) -> None:
        cells = []
        for cell in _cells(row):
            inner = _WordReader()
            inner.read(cell)
            self.images += inner.images
            cells.append(" ".join(part.text for part in inner.paragraphs.document().parts))
            for _ in range(inner.paragraphs.page_breaks):
                self.paragraphs.begin_page()
        self.paragraphs.add("\t".join(cells))
        self.paragraphs.end_item()


def _cells(row: Element) -> Iterator[Element]:
    for child in row:
        if local(child) == "tc":
            yield child
        elif local(child) in ("sdt", "sdtContent"):  # cells that can be filled in
            yield from _cells(child)

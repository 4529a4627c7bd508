"""Reads PowerPoint files (.pptx): the slides in their order, each with its notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sansgpu.data.documents.archive import Element, attribute, children, local, open_archive
from sansgpu.data.documents.document import Document, numbered
from sansgpu.data.documents.text import cleaned

_REPEATED = {"sldNum", "dt", "ftr", "hdr", "sldImg"}  # placeholders for the slide's number, date and footer


def read_pptx(path: Path) -> Document:
    """Reads the slides of a PowerPoint file. Raises UnreadableError."""
    with open_archive(path, "a PowerPoint file (.pptx)") as archive:
        main = next(
            (name for kind, name in archive.targets("").values() if kind == "officeDocument"), "ppt/presentation.xml"
        )
        relations = archive.targets(main)
        listed = children(archive.xml(main), "sldIdLst", "sldId")
        names = [name for slide in listed if (name := relations.get(_relation(slide), ("", ""))[1]) in archive.names]
        images = 0
        texts = []
        for name in names:
            slide = archive.xml(name)
            images += sum(local(element) == "pic" for element in slide.iter())
            notes = [other for kind, other in archive.targets(name).values() if kind == "notesSlide"]
            found = [slide, *(archive.xml(other) for other in notes if other in archive.names)]
            texts.append(cleaned("\n\n".join(text for part in found for text in _blocks(part))))
        return Document("slide", numbered(texts), left_out={"image": images} if images else {})


def _relation(slide: Element) -> str:
    """Returns the attribute r:id, which has the name of the slide's own id but a namespace."""
    return next((value for key, value in slide.attrib.items() if key.endswith("relationships}id")), "")


def _blocks(element: Element) -> Iterator[str]:
    """Yields the text of each shape, and of each table with a row per line."""
    name = local(element)
    placeholders = children(element, "nvSpPr", "nvPr", "ph") if name == "sp" else ()
    if name == "Fallback" or any(attribute(holder, "type") in _REPEATED for holder in placeholders):
        return
    if name == "txBody":
        lines = [_text(paragraph) for paragraph in children(element, "p")]
    elif name == "tbl":
        rows = (
            [" ".join(_blocks(cell)).replace("\n", " ") for cell in children(row, "tc")]
            for row in children(element, "tr")
        )
        lines = ["\t".join(row) for row in rows]
    else:
        for child in element:
            yield from _blocks(child)
        return
    if text := "\n".join(line for line in lines if line.strip()):
        yield text


def _text(paragraph: Element) -> str:
    words = []
    for element in paragraph.iter():
        if local(element) == "t":
            words.append(element.text or "")
        elif local(element) == "br":
            words.append("\n")
    return "".join(words)

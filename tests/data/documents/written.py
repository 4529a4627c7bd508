"""Writes documents, and reads them with their parts."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sansgpu.config.data import DataConfig
from sansgpu.config.errors import is_installed
from sansgpu.data.documents.reading import read_document
from sansgpu.data.sources import Source, open_single

needs_pdfium = pytest.mark.skipif(not is_installed("pypdfium2"), reason="needs pypdfium2")
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
MILL = "The mill grinds rye and wheat."


def archive(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def word_file(path: Path, body: str, **more: str) -> Path:
    document = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return archive(path, {"word/document.xml": document, **more})


def paragraph(text: str, properties: str = "") -> str:
    return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"


def odt_file(path: Path, body: str, attributes: str = "", styles: str = "") -> Path:
    names = ("office", "style", "text", "table", "fo", "draw")
    spaces = " ".join(f'xmlns:{name}="urn:{name}"' for name in names)
    text = f"<office:body><office:text {attributes}>{body}</office:text></office:body>"
    return archive(path, {"content.xml": f"<office:document-content {spaces}>{styles}{text}</office:document-content>"})


Placed = tuple[float, float, str]  # left and height in points, and a text


def pdf_file(path: Path, pages: Sequence[Sequence[Placed]]) -> Path:
    """Writes a PDF file with lines of text in Helvetica. A page without lines has a rectangle."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for lines in pages:
        shown = [f"BT /F1 10 Tf {left} {height} Td ({text}) Tj ET" for left, height, text in lines]
        content = "\n".join(shown or ["100 100 300 300 re f"])
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {len(objects) + 2} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    text, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(text))
        text += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    trailer = f"trailer << /Size {size} /Root 1 0 R >>\nstartxref\n{len(text)}\n%%EOF\n"
    path.write_text(f"{text}xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}", encoding="latin-1")
    return path


def parts_of(path: Path) -> list[tuple[int, str]]:
    return [(part.number, part.text) for part in read_document(path).parts]


def text_of(path: Path) -> str:
    return "\n\n".join(read_document(path).texts())


def source_of(path: Path, text_rows: bool = False) -> Source:
    return open_single(str(path), DataConfig(dataset_name=str(path)), text_rows)

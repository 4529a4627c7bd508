"""Reads PDF files with PDFium, which gives the characters of a page in the order in which they were written.

Pages have lines, not paragraphs: lines are joined as in the original text, and what repeats on many pages is removed.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from sansgpu.data.documents.content import is_packed, open_content
from sansgpu.data.documents.document import Document, DocumentPart, UnreadableError
from sansgpu.data.documents.edges import without_repeated_edges
from sansgpu.data.documents.layout import PageLine, join_lines, with_whole_words
from sansgpu.data.documents.text import cleaned


def read_pdf(path: Path) -> Document:
    """Reads the pages of a PDF file. Raises UnreadableError."""
    import pypdfium2

    content: Any = open_content(path) if is_packed(path) else str(path)
    try:
        pdf = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise UnreadableError("is protected by a password; save it without one") from None
        raise UnreadableError("is not a valid PDF file; download or export it again") from None
    pages, heights, drawn = [], [], []
    for number in range(len(pdf)):
        try:
            page = pdf[number]
            lines, height = _lines(page), page.get_height()
            drawn.append(pypdfium2.raw.FPDFPage_CountObjects(page) > 0)
            page.close()
        except pypdfium2.PdfiumError:  # a damaged page does not spoil the others
            lines, height = [], 0.0
            drawn.append(True)
        pages.append(lines)
        heights.append(height)
    pages = without_repeated_edges(pages, heights)
    texts = [cleaned(text) for text in with_whole_words([join_lines(lines) for lines in pages])]
    blank = sum(has_drawing and not text.strip() for has_drawing, text in zip(drawn, texts, strict=True))
    parts = tuple(DocumentPart(number, text) for number, text in enumerate(texts, 1) if text.strip())
    return Document("page", parts, pages=len(texts), blank=blank)


def _lines(page: Any) -> list[PageLine]:
    text_page = page.get_textpage()
    text = text_page.get_text_range()
    lines, start = [], 0
    for line in text.split("\r\n"):
        if line.strip():
            first = start + len(line) - len(line.lstrip())
            last = start + len(line.rstrip()) - 1
            lines.append(_line(text_page, line.strip(), first, last))
        start += len(line) + 2
    text_page.close()
    return lines


def _line(text_page: Any, text: str, first: int, last: int) -> PageLine:
    """Finds the place of a line from its first and last character."""
    from pypdfium2 import raw

    first, last = (max(0, raw.FPDFText_GetCharIndexFromTextIndex(text_page, index)) for index in (first, last))
    left, right, x = text_page.get_charbox(first)[0], text_page.get_charbox(last)[2], ctypes.c_double()
    top, bottom = ctypes.c_double(), ctypes.c_double()
    raw.FPDFText_GetCharOrigin(text_page, first, ctypes.byref(x), ctypes.byref(top))
    raw.FPDFText_GetCharOrigin(text_page, last, ctypes.byref(x), ctypes.byref(bottom))
    return PageLine(text, left, right, top.value, bottom.value)

"""Collects the paragraphs of Office and OpenDocument files by pages."""

from __future__ import annotations

from sansgpu.data.documents.document import Document, DocumentPart
from sansgpu.data.documents.text import cleaned


class Paragraphs:
    """The text of a document while it is read. Pages are counted only in files that say where they begin."""

    def __init__(self) -> None:
        self._pages: list[list[str]] = [[]]
        self._words: list[str] = []
        self._new_pages = 0
        self._last: str | None = None  # prefix of the last item, or None after a paragraph

    @property
    def page_breaks(self) -> int:
        return len(self._pages) - 1

    def add(self, text: str) -> None:
        self._words.append(text)

    def begin_page(self) -> None:
        """Begins a new page: with this paragraph if it has no text yet, otherwise with the next one."""
        self._new_pages += 1
        if not self._words:
            self._turn_pages()

    def end_paragraph(self) -> None:
        self._end(None)

    def end_item(self, prefix: str = "") -> None:
        """Ends an item of a list or a row of a table, which forms one paragraph with the one before."""
        self._end(prefix)

    def _end(self, prefix: str | None) -> None:
        text, self._words = "".join(self._words).strip("\n "), []
        page = self._pages[-1]
        if text.strip():
            if page and prefix is not None and prefix == self._last:
                page[-1] += f"\n{prefix}{text}"
            else:
                page.append((prefix or "") + text)
            self._last = prefix
        self._turn_pages()

    def _turn_pages(self) -> None:
        self._pages += [[] for _ in range(self._new_pages)]
        self._new_pages = 0

    def document(self, left_out: dict[str, int] | None = None) -> Document:
        """Returns the pages, or the paragraphs if the file has no pages."""
        pages = [cleaned("\n\n".join(page)) for page in self._pages]
        if len(pages) > 1:
            parts = [DocumentPart(number, text) for number, text in enumerate(pages, 1) if text]
            return Document("page", parts, left_out=left_out or {})
        single = [DocumentPart(number, cleaned(text)) for number, text in enumerate(self._pages[0], 1)]
        return Document("paragraph", single, left_out=left_out or {})

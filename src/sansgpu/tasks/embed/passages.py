"""Splits files into passages, such as paragraphs with their lines or pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.data.documents.collection import Collection
from sansgpu.data.documents.formats import format_of
from sansgpu.data.documents.reading import read_document
from sansgpu.data.files import Piece, read_documents, read_rows
from sansgpu.data.formats.names import TEXT_SUFFIXES, file_form
from sansgpu.data.rows import text_of
from sansgpu.events.progress import Warn

SHORT_WORDS = 12  # a paragraph with fewer words, such as a heading, is joined to the next one
MAX_CHARS = 1 << 16  # maximum length of a paragraph; a file without empty lines would be a single one
BATCH = 512  # paragraphs per call of the tokenizer

Spans = Sequence[tuple[int, int]]  # start and end character of each token of a text
FindTokens = Callable[[list[str]], Sequence[Spans]]


@dataclass(frozen=True)
class Passage:
    """A passage of a file. `number` is its first line or row, or its page (see `unit`), counted from 1."""

    unit: str
    number: int
    text: str

    def place_in(self, file: Path | str) -> str:
        """Returns where the passage is, e.g. notes.md:12 or handbook.pdf, page 3."""
        return f"{file}:{self.number}" if self.unit == "line" else f"{file}, {self.unit} {self.number}"


@dataclass(frozen=True)
class PassageRules:
    """How files are split into passages of at most `max_tokens` tokens. `column` has the text of rows."""

    find_tokens: FindTokens
    max_tokens: int
    column: str | int | None = None

    def read(self, path: Path) -> list[Passage]:
        """Returns the passages of a file: the paragraphs of its text or rows. Raises ConfigError if it is invalid."""
        if format_of(path) is not None:
            found = _page_paragraphs(path)
        elif file_form(path) in TEXT_SUFFIXES:
            found = _paragraphs(_lines(read_documents(path, None)))
        else:
            found = self._row_paragraphs(path)
        passages: list[Passage] = []
        while some := list(islice(found, BATCH)):
            passages += self._cut(some)
        return passages

    def read_or_skip(self, path: Path, collection: Collection, warn: Warn) -> list[Passage] | None:
        """Returns the passages of a file, or None with a warning if it cannot be read.

        `collection` collects what of documents is left out, which the caller says once all files are read.
        """
        if format_of(path) is not None and collection.read(path) is None:
            return None
        try:
            return self.read(path)
        except ConfigError as error:
            warn(f"a file is skipped: {error}")
            return None

    def _row_paragraphs(self, path: Path) -> Iterator[Passage]:
        for row in read_rows(path, header=not isinstance(self.column, int)):
            text = text_of(row, self.column)
            unit, number = row.where.rpartition(", ")[2].split()
            for paragraph in _paragraphs(_lines([Piece(text, True)])):
                yield Passage(unit, int(number), paragraph.text)

    def _cut(self, paragraphs: Sequence[Passage]) -> Iterator[Passage]:
        tokens = self.find_tokens([paragraph.text for paragraph in paragraphs])
        for paragraph, spans in zip(paragraphs, tokens, strict=True):
            for first in range(0, len(spans), self.max_tokens):
                begin, end = spans[first][0], spans[min(first + self.max_tokens, len(spans)) - 1][1]
                text = paragraph.text[begin:end] if len(spans) > self.max_tokens else paragraph.text
                lines_before = paragraph.text.count("\n", 0, begin) if paragraph.unit == "line" else 0
                yield Passage(paragraph.unit, paragraph.number + lines_before, text.strip("\r\n"))


def _page_paragraphs(path: Path) -> Iterator[Passage]:
    """Yields the paragraphs of a document with their pages. Paragraphs that are counted themselves may be joined."""
    document = read_document(path)
    if document.unit == "paragraph":
        lines = (Passage(document.unit, part.number, line) for part in document.parts for line in (part.text, ""))
        yield from _paragraphs(lines)
        return
    for part in document.parts:
        for paragraph in _paragraphs(_lines([Piece(part.text, True)])):
            yield Passage(document.unit, part.number, paragraph.text)


def _lines(pieces: Iterable[Piece]) -> Iterator[Passage]:
    """Yields the lines of a document without line ends. Lines that are longer than a piece are split."""
    number = 1
    for piece in pieces:
        *lines, last = piece.text.split("\n")
        for line in (*lines, last) if last else lines:
            yield Passage("line", number, line)
            number += 1
        number -= bool(last)


def _paragraphs(lines: Iterable[Passage]) -> Iterator[Passage]:
    """Joins lines to paragraphs, which end at an empty line."""
    block: list[str] = []
    unit, number, words, chars = "line", 0, 0, 0
    for line in lines:
        if not block:
            unit, number, words, chars = line.unit, line.number, 0, 0
        elif chars > MAX_CHARS or (words >= SHORT_WORDS and not line.text.strip()):
            yield Passage(unit, number, "\n".join(block))
            block, number, words, chars = [], line.number, 0, 0
        if block or line.text.strip():
            block.append(line.text)
            words, chars = words + len(line.text.split()), chars + len(line.text)
    if block:
        yield Passage(unit, number, "\n".join(block))

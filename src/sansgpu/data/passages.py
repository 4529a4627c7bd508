"""Cuts the documents of files into passages that are short enough for a model that embeds texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sansgpu.data.files import TEXT_SUFFIXES, Piece, file_form, read_documents, read_rows
from sansgpu.data.rows import row_text

SHORT_WORDS = 12  # a paragraph with fewer words, such as a heading, is joined with the next one
MAX_CHARS = 1 << 16  # longest paragraph; a file without empty lines would be a single one
BATCH = 512  # paragraphs tokenized at a time

Spans = Sequence[tuple[int, int]]  # (begin, end) of each token in a text
FindTokens = Callable[[list[str]], Sequence[Spans]]


@dataclass(frozen=True)
class Passage:
    """A part of a file. `number` counts its lines or rows, as `unit` says, from 1."""

    unit: str
    number: int
    text: str


@dataclass(frozen=True)
class PassageRules:
    """How files are cut: passages have at most `max_tokens` tokens. Rows have their text in `column`."""

    find_tokens: FindTokens
    max_tokens: int
    column: str | int | None = None

    def read(self, path: Path) -> list[Passage]:
        """Returns the passages of a file: its paragraphs, or those of its rows. Raises ConfigError if it is invalid."""
        is_text = file_form(path) in TEXT_SUFFIXES
        found = _paragraphs(_lines(read_documents(path, None))) if is_text else self._row_paragraphs(path)
        passages: list[Passage] = []
        while some := list(islice(found, BATCH)):
            passages += self._cut(some)
        return passages

    def _row_paragraphs(self, path: Path) -> Iterator[Passage]:
        for row in read_rows(path, header=not isinstance(self.column, int)):
            value = row.readable_value()
            if not isinstance(value, (str, dict)):
                raise row.error(f"it is a {type(value).__name__}, not an object with a text")
            text = value if isinstance(value, str) else row_text(value, self.column, row.where)
            unit, number = row.where.rpartition(", ")[2].split()
            for paragraph in _paragraphs(_lines([Piece(row.valid_text(text, "text"), True)])):
                yield Passage(unit, int(number), paragraph.text)

    def _cut(self, paragraphs: Sequence[Passage]) -> Iterator[Passage]:
        tokens = self.find_tokens([paragraph.text for paragraph in paragraphs])
        for paragraph, spans in zip(paragraphs, tokens, strict=True):
            for first in range(0, len(spans), self.max_tokens):
                begin, end = spans[first][0], spans[min(first + self.max_tokens, len(spans)) - 1][1]
                text = paragraph.text[begin:end] if len(spans) > self.max_tokens else paragraph.text
                lines_before = paragraph.text.count("\n", 0, begin) if paragraph.unit == "line" else 0
                yield Passage(paragraph.unit, paragraph.number + lines_before, text.strip("\r\n"))


def _lines(pieces: Iterable[Piece]) -> Iterator[Passage]:
    """Yields the lines of a document without their ends; one that is longer than a piece is yielded in parts."""
    number = 1
    for piece in pieces:
        *lines, last = piece.text.split("\n")
        for line in (*lines, last) if last else lines:
            yield Passage("line", number, line)
            number += 1
        number -= bool(last)


def _paragraphs(lines: Iterable[Passage]) -> Iterator[Passage]:
    """Joins lines up to an empty one."""
    block: list[str] = []
    number = words = chars = 0
    for line in lines:
        if not block:
            number, words, chars = line.number, 0, 0
        elif chars > MAX_CHARS or (words >= SHORT_WORDS and not line.text.strip()):
            yield Passage("line", number, "\n".join(block))
            block, number, words, chars = [], line.number, 0, 0
        if block or line.text.strip():
            block.append(line.text)
            words, chars = words + len(line.text.split()), chars + len(line.text)
    if block:
        yield Passage("line", number, "\n".join(block))

"""The text of a document by pages, as readers return it, and counts of its parts that are not text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SENTENCE_ENDS = (".", "!", "?", ":", ";")


class UnreadableError(Exception):
    """Raised by a reader. The message is a verb phrase with the remedy, e.g. "is empty; remove it"."""


@dataclass(frozen=True)
class DocumentPart:
    """A page of a document, or another unit; `number` counts from 1."""

    number: int
    text: str

    def paragraphs(self) -> list[str]:
        """Returns the texts between empty lines."""
        return [text for text in self.text.split("\n\n") if text.strip()]


@dataclass(frozen=True)
class Document:
    """The text of a file.

    `unit` names its parts, e.g. "page". If `separate`, each part is a document of its own, e.g. a message of a mailbox.
    `pages` counts all pages, and `blank` those that show something but have no text. `left_out` counts by name what is
    not read, e.g. images.
    """

    unit: str
    parts: Sequence[DocumentPart]
    pages: int = 0
    blank: int = 0
    separate: bool = False
    left_out: Mapping[str, int] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """Returns the text of each document in the file."""
        texts = [part.text for part in self.parts]
        if self.separate or not texts:
            return texts
        return [_joined(texts) if self.unit == "page" else "\n\n".join(texts)]


def numbered(texts: Sequence[str]) -> list[DocumentPart]:
    """Returns the parts that have text, numbered among all of them."""
    return [DocumentPart(number, text) for number, text in enumerate(texts, 1) if text.strip()]


def _joined(pages: Sequence[str]) -> str:
    """Joins pages by an empty line, or by a space within a sentence."""
    joined = [pages[0]]
    for before, page in pairwise(pages):
        continues = page[0].islower() and not before.endswith(SENTENCE_ENDS)
        joined += " " if continues else "\n\n", page
    return "".join(joined)

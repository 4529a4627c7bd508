"""Joins the lines of a page to paragraphs, and the two halves of words that were broken at the end of a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sansgpu.data.documents.text import BULLETS

HYPHEN = "\ufffe"  # marks a hyphen at the end of a line that was joined to the next one
PARAGRAPH_GAP = 1.4  # distance of two lines / usual distance, from which on they are different paragraphs
SAME_LINE = 0.55  # distance of two lines / usual distance, up to which one is e.g. an exponent of the other
SAME_COLUMN_CHARACTERS = 5  # lines that start at most this far apart belong to the same column
# Widths in characters of the page's usual width.
WORD_GAP, CELL_GAP = 0.3, 2.5  # gaps within a line that separate words, and the cells of a table
WORD_WIDTH = 1.25  # of each character of a word, at most
MIN_PROSE = 20  # characters of a line; shorter ones are e.g. headings or code, and are not joined to the next
_NUMBERED = re.compile(r"[\[(]?(?:\d{1,3}(?:\.\d{1,3})+\.?|\d{1,3}[.)\]]|[a-zA-Z][.)\]])\s")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_BROKEN_WORD = re.compile(rf"((?:[^\W_]+-)*)([^\W_]+)-?{HYPHEN}\s*([^\W_]+)((?:-[^\W_]+)*)")


@dataclass(frozen=True)
class PageLine:
    """A line of a page, and where it is in points from the lower left corner.

    `top` is the baseline of its first character and `bottom` that of its last one; they differ in lines that PDFium
    has joined at a hyphen.
    """

    text: str
    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class _PageMeasures:
    """Usual measures of a page in points, and its lines."""

    pitch: float  # distance of two lines
    width: float  # of a character
    lines: Sequence[PageLine]

    def edge(self, line: PageLine) -> float:
        """Returns the right edge of the column of a line."""
        reach = SAME_COLUMN_CHARACTERS * self.width
        return max(other.right for other in self.lines if abs(other.left - line.left) <= reach)


def join_lines(lines: Sequence[PageLine]) -> str:
    """Returns the text of a page. A line is joined to the one before it if its first word did not fit there."""
    pairs = list(pairwise(lines))
    steps = [step for before, line in pairs if (step := before.bottom - line.top) > 1]
    widths = [(line.right - line.left) / len(line.text) for line in lines if HYPHEN not in line.text]
    page = _PageMeasures(median(steps or [12.0]), max(median(widths or [5.0]), 0.1), lines)
    text = [line.text for line in lines[:1]]
    for before, line in pairs:
        text += _separator(before, line, page), line.text
    return "".join(text)


def _separator(before: PageLine, line: PageLine, page: _PageMeasures) -> str:
    """Returns what is between two lines: nothing, a space or tab, the end of a line or paragraph, or a hyphen."""
    step, gap, width = before.bottom - line.top, line.left - before.right, page.width
    if abs(step) <= SAME_LINE * page.pitch and gap > -width:
        return "\t" if gap > CELL_GAP * width else " " if gap > WORD_GAP * width else ""
    if step > PARAGRAPH_GAP * page.pitch:
        return "\n\n"
    in_column = step < 0 or abs(line.left - before.left) <= SAME_COLUMN_CHARACTERS * width  # up: the next column
    starts_item = line.text.startswith(BULLETS) or _NUMBERED.match(line.text)
    is_table = before.text[-1].isdigit() and not line.text[0].islower()
    if len(before.text) < MIN_PROSE or not in_column or starts_item or is_table or before.text[-1] in "{};":
        return "\n"
    first_word = line.text.split(None, 1)[0].partition(HYPHEN)[0]
    if before.right + WORD_WIDTH * width * (1 + len(first_word)) < page.edge(before):
        return "\n"
    if before.text[-1] == "-" and before.text[-2].isalpha() and line.text[0].islower():
        return HYPHEN
    return " "


def with_whole_words(pages: Sequence[str]) -> list[str]:
    """Joins words at `HYPHEN`. The hyphen stays if the word with it occurs more often elsewhere in the document.

    It also stays in a word with other hyphens, such as state-of-the-art, if both of its neighbors are words of the
    document, but not together. Hyphens at the end of a page are left, since the next page is separate text.
    """
    text = "\n".join(pages)
    if HYPHEN not in text:
        return list(pages)
    unbroken = _BROKEN_WORD.sub("\n", text).replace(HYPHEN, "\n")
    words = Counter(match.casefold() for match in _WORD.findall(unbroken))

    def whole(match: re.Match[str]) -> str:
        start, left, right, end = match.groups()
        joined, hyphenated = (f"{start}{left}{hyphen}{right}{end}" for hyphen in ("", "-"))
        counts = words[joined.casefold()], words[hyphenated.casefold()]
        are_words = all(words[part.casefold()] for part in (left, right)) and not words[f"{left}{right}".casefold()]
        keeps = counts[1] > counts[0] or (counts == (0, 0) and bool(start or end) and are_words)
        return hyphenated if keeps else joined

    return [_BROKEN_WORD.sub(whole, page).replace(f"-{HYPHEN}", HYPHEN).replace(HYPHEN, "-") for page in pages]

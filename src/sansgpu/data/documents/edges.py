"""Removes headers, footers and page numbers: lines at the top or bottom that are at the same place on many pages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from sansgpu.data.documents.layout import PageLine

EDGE_LINES = 3  # lines at the top and at the bottom of a page that may repeat
EDGE_RATIO = 0.15  # of the height of a page; lines further from its edges are text
TITLE_WORDS = 4  # a longer line that ends like a sentence is text, unless it is equal on other pages
SAME_HEIGHT = 6.0  # points that such lines may differ in height
# A line is removed if it occurs on 3 of 8 pages in a row, or on both of two pages. For page numbers, 2 pages suffice.
NEARBY_PAGES, REPEATS, NUMBER_REPEATS = 8, 3, 2
_NUMBER = re.compile(r"\d+")
_ROMAN = re.compile(r"[ivxlc]+")
_ROMAN_DIGITS = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
Form = tuple[str, int, int]  # (what a line has in common with the same line of other pages, height, repeats needed)


def without_repeated_edges(pages: Sequence[list[PageLine]], heights: Sequence[float]) -> list[list[PageLine]]:
    """Returns the pages, of these heights in points, without their headers, footers and page numbers."""
    forms = [
        {line: _forms(line, number) for line in _edges(lines, height)}
        for number, (lines, height) in enumerate(zip(pages, heights, strict=True))
    ]
    places: defaultdict[Form, set[int]] = defaultdict(set)
    for number, found in enumerate(forms):
        for form in (form for several in found.values() for form in several):
            places[form].add(number)
    repeated = {form for form in places if _is_repeated(_pages_near(form, places), form[2], len(pages))}
    return [_left(lines, found, repeated) for lines, found in zip(pages, forms, strict=True)]


def _left(lines: list[PageLine], forms: Mapping[PageLine, list[Form]], repeated: set[Form]) -> list[PageLine]:
    """Returns the lines that are not repeated. If that is none, the page has equal text: only its number is removed."""
    left = [line for line in lines if repeated.isdisjoint(forms.get(line, ()))]
    return left or [line for line in lines if any(map(str.isalpha, line.text))]


def _edges(lines: list[PageLine], height: float) -> list[PageLine]:
    ordered = sorted(lines, key=lambda line: line.top)
    bottom = [line for line in ordered[:EDGE_LINES] if line.top < EDGE_RATIO * height]
    return [*bottom, *(line for line in ordered[-EDGE_LINES:] if line.top > (1 - EDGE_RATIO) * height)]


def _forms(line: PageLine, page: int) -> list[Form]:
    """Returns the text with any numbers, and how much its first or last number is ahead of the page."""
    height, words = int(line.top // SAME_HEIGHT), line.text.casefold().split()
    if not any(map(str.isalpha, line.text)) or (len(words) == 1 and _page_number(words[0]) is not None):
        first = next((number for word in words if (number := _page_number(word)) is not None), None)
        return [] if first is None else [(f"#{first - page}", height, NUMBER_REPEATS)]
    if len(words) > TITLE_WORDS and line.text.endswith((".", "!", "?")):  # a sentence of the text
        return [(line.text, height, REPEATS)]
    numbers = {number - page for word in (words[0], words[-1]) if (number := _page_number(word)) is not None}
    ahead = [(f"#{number}", height, REPEATS) for number in numbers]
    return [*ahead, (_NUMBER.sub("#", " ".join(words)), height, REPEATS)]


def _page_number(word: str) -> int | None:
    word = word.strip("-–—|/()[].")
    if word.isdecimal() and len(word) < 6:
        return int(word)
    return _roman(word) if _ROMAN.fullmatch(word) else None


def _pages_near(form: Form, places: Mapping[Form, set[int]]) -> list[int]:
    text, height, needed = form
    near = (places.get((text, height + change, needed), set()) for change in (-1, 0, 1))
    return sorted(set[int]().union(*near))


def _roman(text: str) -> int:
    values = [_ROMAN_DIGITS[letter] for letter in text]
    pairs = zip(values, [*values[1:], 0], strict=True)
    return sum(-value if value < following else value for value, following in pairs)


def _is_repeated(pages: list[int], needed: int, count: int) -> bool:
    needed = min(needed, count)
    last = pages[needed - 1 :]
    return needed > 1 and any(stop - start < NEARBY_PAGES for start, stop in zip(pages, last, strict=False))

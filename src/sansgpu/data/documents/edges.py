"""Removes headers, footers and page numbers: lines at the top or bottom that are at the same place on many pages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from sansgpu.data.documents.layout import PageLine

EDGE_LINES = 3  # lines at the top and at the bottom of a page that may repeat
SAME_HEIGHT = 6.0  # points that such lines may differ in height
# A line is removed if it occurs on 3 of 8 pages in a row, or on both of two pages. For page numbers, 2 pages suffice.
NEARBY_PAGES, REPEATS, NUMBER_REPEATS = 8, 3, 2
_NUMBER = re.compile(r"\d+")
_ROMAN = re.compile(r"[ivxlc]+")
_ROMAN_DIGITS = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
Form = tuple[str, int, int]  # (what a line has in common with the same line of other pages, height, repeats needed)


def without_repeated_edges(pages: Sequence[list[PageLine]]) -> list[list[PageLine]]:
    """Returns the pages without their headers, footers and page numbers."""
    forms = [{line: _forms(line, number) for line in _edges(lines)} for number, lines in enumerate(pages)]
    places: defaultdict[Form, set[int]] = defaultdict(set)
    for number, found in enumerate(forms):
        for form in (form for several in found.values() for form in several):
            places[form].add(number)
    repeated = {form for form in places if _is_repeated(_pages_near(form, places), form[2], len(pages))}
    return [
        [line for line in lines if repeated.isdisjoint(found.get(line, ()))]
        for lines, found in zip(pages, forms, strict=True)
    ]


def _edges(lines: list[PageLine]) -> list[PageLine]:
    ordered = sorted(lines, key=lambda line: line.top)
    return ordered if len(ordered) <= 2 * EDGE_LINES else [*ordered[:EDGE_LINES], *ordered[-EDGE_LINES:]]


def _forms(line: PageLine, page: int) -> list[Form]:
    """Returns the text with any numbers, and how much its first or last number is ahead of the page."""
    height, words = int(line.top // SAME_HEIGHT), line.text.casefold().split()
    numbers = {number - page for word in (words[0], words[-1]) if (number := _page_number(word)) is not None}
    needed = NUMBER_REPEATS if len(words) == 1 else REPEATS
    forms = [(f"#{ahead}", height, needed) for ahead in numbers]
    if any(character.isalpha() for character in line.text):
        forms.append((_NUMBER.sub("#", " ".join(words)), height, REPEATS))
    return forms


def _page_number(word: str) -> int | None:
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

"""Converts spans of a text to tagged words, and finds out what the offsets of a whole dataset's spans count.

JavaScript, Java and C# count UTF-16 units, in which an emoji is two; Rust and Go count UTF-8 bytes; Python counts
characters. doccano can count what a reader sees as one character (a grapheme cluster, e.g. a letter and its accent),
and Label Studio counts a line end as one. Some tools give the last character of a span instead of the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from sansgpu.data.forms.words import TaggedText, WordSpan, iob2_tags, longest_first, word_bounds
from sansgpu.data.rows import TypedRow

Unit = Literal["characters", "utf16", "bytes", "graphemes"]
UNITS: dict[Unit, str] = {  # their names
    "characters": "characters",
    "utf16": "UTF-16 units",
    "bytes": "UTF-8 bytes",
    "graphemes": "grapheme clusters",
}
SAMPLE_TEXTS = 2000  # maximum texts of each kind by which the unit is found
_CLUSTERS = Split(Regex(r"\X"), "isolated")


class GivenSpan(NamedTuple):
    """A span as a row has it. The unit of its offsets is unknown."""

    start: int
    end: int
    label: str
    text: str | None = None


class Offsets(NamedTuple):
    """What the offsets of spans count."""

    unit: Unit = "characters"
    inclusive: bool = False  # True: `end` is the last position of a span

    def characters(self, text: str, span: GivenSpan) -> tuple[int, int] | None:
        """Returns the start and end characters of a span, or None if it is empty or not within the text."""
        start, end = span.start, span.end + self.inclusive
        if self.unit != "characters" and not _is_plain(text):
            edges = _edges(text, self.unit)
            places = np.searchsorted(edges, (start, end))
            if any(place == len(edges) or edges[place] != at for place, at in zip(places, (start, end), strict=True)):
                return None
            start, end = map(int, places)
        return (start, end) if 0 <= start < end <= len(text) else None


def _is_plain(text: str) -> bool:
    """Returns whether all units count the same in a text."""
    return text.isascii() and "\r\n" not in text


@lru_cache(maxsize=4)  # enough for all units and spans of the current text
def _edges(text: str, unit: Unit) -> np.ndarray:
    """Returns the offset of each character and of the end of a text, (characters + 1,), in a unit.

    Those of characters within a grapheme cluster are not integers.
    """
    if unit == "graphemes":
        clusters = [end - start for _, (start, end) in _CLUSTERS.pre_tokenize_str(text)]
        shares = [part for size in clusters for part in (1.0,) * (size == 1) or (0.5, *[0.0] * (size - 2), 0.5)]
        return np.concatenate(([0], np.cumsum(shares)))
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    wide = codes > 0xFFFF
    sizes = 1 + wide.astype(np.int64) if unit == "utf16" else 1 + (codes > 0x7F) + (codes > 0x7FF) + wide
    return np.concatenate(([0], np.cumsum(sizes)))


@dataclass(frozen=True, eq=False)
class SpannedText(TypedRow):
    """A text with spans, whose offsets are still to be understood."""

    text: str
    spans: tuple[GivenSpan, ...]

    def tagged(self, offsets: Offsets) -> TaggedText:
        """Tags all words that share a character with a span. Raises BadRowError if a span is not in the text."""
        starts, ends = word_bounds(self.text)
        places = [self._characters(number, span, offsets) for number, span in enumerate(self.spans)]
        spans, dropped = longest_first(places)
        found: list[WordSpan] = []
        moved = last_stop = 0
        for begin, end, label in spans:
            start = max(last_stop, int(np.searchsorted(ends, begin, side="right")))
            stop = int(np.searchsorted(starts, end, side="left"))
            if start >= stop:
                dropped += 1
                continue
            found.append(WordSpan(start, stop, label))
            last_stop = stop
            moved += (starts[start], ends[stop - 1]) != (begin, end)
        return TaggedText(self.where, self.text, starts, ends, iob2_tags(found, len(starts)), moved, dropped)

    def _characters(self, number: int, span: GivenSpan, offsets: Offsets) -> WordSpan:
        """Returns a span as (start character, end character, label) after checking it."""
        name, found = f"span {number}", offsets.characters(self.text, span)
        if found is None:
            size = len(self.text) if offsets.unit == "characters" else int(_edges(self.text, offsets.unit)[-1])
            raise self.error(
                f"{name} from {span.start} to {span.end} is empty or not within the {size} {UNITS[offsets.unit]} of "
                "the text"
            )
        part = self.text[slice(*found)]
        if not part.strip():
            raise self.error(f"{name} from {span.start} to {span.end} contains only white space")
        if span.text is not None and span.text.split() != part.split():
            raise self.error(f"{name} has the text {span.text!r}, but its {UNITS[offsets.unit]} are {part!r}")
        return WordSpan(*found, span.label)


def offsets_of(texts: Sequence[SpannedText], unit: Unit | Literal["auto"], note: Callable[[str], None]) -> Offsets:
    """Finds out what the offsets of a dataset count, and passes a message to `note` if that is unusual.

    It is what makes most spans equal to their own text or, if they have none, start and end at word boundaries; of
    equally good units, the first of `UNITS`. Many texts are sampled. `unit` is the configured one.
    """
    if unit != "auto":
        return Offsets(unit)
    fits: dict[Offsets, list[bool]] = {Offsets(one, end): [] for end in (False, True) for one in UNITS}
    for text in _sample(texts):
        starts, ends = map(frozenset, (bounds.tolist() for bounds in word_bounds(text.text)))
        found: dict[Offsets, list[bool]] = {}
        for offsets in fits:
            same = offsets._replace(unit="characters") if _is_plain(text.text) else offsets
            if same not in found:
                found[same] = [_matches(text.text, span, same, (starts, ends)) for span in text.spans]
            fits[offsets] += found[same]
    best = max(list(fits)[: len(UNITS)], key=lambda offsets: sum(fits[offsets]))
    inclusive = max(list(fits)[len(UNITS) :], key=lambda offsets: sum(fits[offsets]))
    differ = [with_end - without for without, with_end in zip(fits[best], fits[inclusive], strict=True)]
    if differ.count(1) > 2 * differ.count(-1) and 2 * sum(fits[inclusive]) > len(differ):
        best = inclusive
    if best != Offsets():
        ends_with = ", and `end` is the last one" if best.inclusive else ""
        note(
            f"the offsets of spans count {UNITS[best.unit]}{ends_with}: so {sum(fits[best]):,} of {len(differ):,} fit "
            f"their text or words, {sum(fits[Offsets()]):,} as characters up to `end`; data.span_offsets sets it."
        )
    return best


def _sample(texts: Sequence[SpannedText]) -> Iterator[SpannedText]:
    """Yields texts with spans from all parts of a dataset: some in which the units differ, and some others."""
    given = [text for text in texts if text.spans]
    for is_plain in (False, True):
        same = [text for text in given if _is_plain(text.text) == is_plain]
        yield from same[:: -(-len(same) // SAMPLE_TEXTS) or 1]


def _matches(text: str, span: GivenSpan, offsets: Offsets, words: tuple[frozenset[int], frozenset[int]]) -> bool:
    found = offsets.characters(text, span)
    if found is None:
        return False
    start, end = found
    part = text[start:end]
    if span.text is not None:
        return part.split() == span.text.split()
    start, end = start + len(part) - len(part.lstrip()), end - (len(part) - len(part.rstrip()))
    return start < end and start in words[0] and end in words[1]

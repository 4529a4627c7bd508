"""Plots as data: defined once, drawn by a browser (page) or for print (paper_plots)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Okabe and Ito's colours without their yellow and black, a little lighter where a dark page needs it.
PALETTE = ("#2b8cce", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7ae6", "#9a8866", "#7f8690")
MOST_POINTS = 2000  # of a series: more than a screen is wide

Value = float | int | str | None


@dataclass(frozen=True)
class Series:
    """One line, or one set of bars."""

    name: str  # of what it shows; may be empty where a plot shows one thing
    x: Sequence[Value]
    y: Sequence[Value]
    colour: int = 0  # of the palette
    dash: int = 0  # solid, dashed, dotted, both
    marked: bool = False  # a dot at each point
    run: int = 0  # the number of the run it is of
    of: str = ""  # that run's name, where there are several
    along: Mapping[str, Sequence[Value]] = field(default_factory=dict)  # x on the plot's other axes

    @property
    def full_name(self) -> str:
        """With the run's."""
        return ": ".join(part for part in (self.of, self.name) if part)


@dataclass(frozen=True)
class Plot:
    """What is drawn. Of `rows`, bars from left to right on top of each other, y holds the names."""

    name: str  # of a file
    title: str
    x: str  # what an axis shows, with its unit
    y: str
    series: Sequence[Series]
    kind: Literal["lines", "bars", "rows"] = "lines"
    note: str = ""
    from_zero: bool = False
    log: bool = False
    wide: bool = False  # for its room on a page

    @property
    def rows(self) -> list[str]:
        """Of `rows`, the names from top to bottom, in the order of the runs."""
        return list(dict.fromkeys(str(name) for s in sorted(self.series, key=lambda s: s.run) for name in s.y))


def thinned(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """The places of at most `most` values that are drawn: all, or the extremes of many buckets."""
    if len(values) <= most:
        return list(range(len(values)))
    size = -(-len(values) * 2 // most)
    return list(_extremes(values, size))


def _extremes(values: Sequence[float | None], size: int) -> Iterator[int]:
    for start in range(0, len(values), size):
        told = [(value, place) for place, value in enumerate(values[start : start + size], start) if value is not None]
        if told:
            yield from sorted({min(told)[1], max(told)[1]})


def evenly(count: int, most: int) -> list[int]:
    """`most` of the numbers below `count`, the first and the last among them; all where there are no more."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})

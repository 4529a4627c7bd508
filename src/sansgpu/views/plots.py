"""Plot definitions, which `page` draws in a browser and `paper_plots` draws for print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Okabe and Ito's colors without yellow and black, some of them lighter for dark pages.
PALETTE = ("#2b8cce", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7ae6", "#9a8866", "#7f8690")
MAX_POINTS = 2000  # maximum points in a series; more than a screen is wide

Value = float | int | str | None


@dataclass(frozen=True)
class Series:
    """One line, or one set of bars."""

    name: str  # may be empty if a plot has one series
    x: Sequence[Value]
    y: Sequence[Value]
    color: int = 0  # index in the palette
    dash: int = 0  # solid, dashed, dotted, dash-dotted
    marked: bool = False  # a dot at each point
    run: int = 0  # index of the run
    of: str = ""  # name of the run if there are several
    along: Mapping[str, Sequence[Value]] = field(default_factory=dict)  # x values for other x axes

    @property
    def full_name(self) -> str:
        return ": ".join(part for part in (self.of, self.name) if part)


@dataclass(frozen=True)
class Plot:
    """A plot. `rows` are horizontal stacked bars, whose y values are names."""

    name: str  # file name
    title: str
    x: str  # axis label with unit
    y: str
    series: Sequence[Series]
    kind: Literal["lines", "bars", "rows"] = "lines"
    note: str = ""
    from_zero: bool = False
    log: bool = False
    wide: bool = False  # full page width

    @property
    def rows(self) -> list[str]:
        """The names of horizontal bars from top to bottom, in the order of the runs."""
        return list(dict.fromkeys(str(name) for s in sorted(self.series, key=lambda s: s.run) for name in s.y))


def downsample(values: Sequence[float | None], max_count: int = MAX_POINTS) -> list[int]:
    """Returns the indices of at most `most` values: all, or the minimum and maximum of equal buckets."""
    if len(values) <= max_count:
        return list(range(len(values)))
    size = -(-len(values) * 2 // max_count)
    return list(_extremes(values, size))


def _extremes(values: Sequence[float | None], size: int) -> Iterator[int]:
    for start in range(0, len(values), size):
        valid = [(value, place) for place, value in enumerate(values[start : start + size], start) if value is not None]
        if valid:
            yield from sorted({min(valid)[1], max(valid)[1]})


def evenly(count: int, max_count: int) -> list[int]:
    """Returns at most `most` evenly spaced indices below `count`, including the first and the last."""
    if count <= max_count:
        return list(range(count))
    return sorted({round(i * (count - 1) / (max_count - 1)) for i in range(max_count)})

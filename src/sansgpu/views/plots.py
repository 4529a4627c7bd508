"""Plots: their definitions, and images of them for print. `page` draws the same definitions in a browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sansgpu.config.errors import require

# Okabe and Ito's colors without yellow and black, some of them lighter for dark pages.
PALETTE = ("#2b8cce", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7ae6", "#9a8866", "#7f8690")
MAX_POINTS = 2000  # maximum points in a series; more than a screen is wide

# Images are drawn by matplotlib.
DASH_STYLES = ("-", "--", ":", "-.")
WIDTH, HEIGHT, DPI = 3.5, 2.5, 300  # inches of one column in a paper; dots per inch of png files
BAR_HEIGHT, LEGEND_HEIGHT = 0.3, 0.15  # inches per bar and per line of a legend below the plot
MAX_LEGEND_INSIDE = 3  # entries; a longer legend would hide the curves
_STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.5, "axes.axisbelow": True, "svg.fonttype": "none", "svg.hashsalt": "sansgpu",
}  # fmt: skip

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
    chart: Literal["lines", "bars", "rows"] = "lines"
    note: str = ""
    from_zero: bool = False
    log: bool = False
    wide: bool = False  # full page width

    @property
    def rows(self) -> list[str]:
        """The names of horizontal bars from top to bottom, in the order of the runs."""
        return list(dict.fromkeys(str(name) for s in sorted(self.series, key=lambda s: s.run) for name in s.y))


def downsample(values: Sequence[float | None], max_count: int = MAX_POINTS) -> list[int]:
    """Returns the indices of at most `max_count` values: all, or the minimum and maximum of equal buckets."""
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
    """Returns at most `max_count` evenly spaced indices below `count`, including the first and the last."""
    if count <= max_count:
        return list(range(count))
    return sorted({round(i * (count - 1) / (max_count - 1)) for i in range(max_count)})


def write_plots(plots: Sequence[Plot], folder: Path, form: str) -> list[Path]:
    """Writes each plot as NAME.png or NAME.svg. Raises ConfigError without matplotlib, and OSError."""
    require(f"--format {form}", "matplotlib")
    import matplotlib
    from matplotlib.figure import Figure

    written = []
    for plot in plots:
        with matplotlib.rc_context(_STYLE):
            drawn = Figure((WIDTH, HEIGHT), layout="constrained")
            _draw(plot, drawn, drawn.subplots())
            path = folder / f"{plot.name}.{form}"
            drawn.savefig(path, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else None)
            written.append(path)
    return written


def _draw(plot: Plot, drawn: Any, axes: Any) -> None:
    if plot.chart == "lines":
        _lines(plot, axes)
    elif plot.chart == "bars":
        _bars(plot, axes)
    else:
        _rows(plot, axes)
    axes.set_title(plot.title, fontsize=9)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    handles, names = axes.get_legend_handles_labels()
    named = {name: handle for handle, name in zip(handles, names, strict=True) if name}
    if plot.chart == "rows":
        drawn.set_figheight(0.9 + BAR_HEIGHT * len(axes.get_yticks()))
    if len(named) > MAX_LEGEND_INSIDE or (len(named) > 1 and plot.chart != "lines"):
        columns = 3 if plot.chart == "rows" else 2
        drawn.legend(named.values(), named.keys(), frameon=False, loc="outside lower center", ncols=columns)
        drawn.set_figheight(drawn.get_figheight() + LEGEND_HEIGHT * -(-len(named) // columns))
    elif len(named) > 1:
        axes.legend(named.values(), named.keys(), frameon=False)


def _lines(plot: Plot, axes: Any) -> None:
    for series in plot.series:
        values = [float("nan") if value is None else value for value in series.y]
        style = {"linestyle": DASH_STYLES[series.dash % len(DASH_STYLES)], "marker": "o" if series.marked else ""}
        color = PALETTE[series.color % len(PALETTE)]
        axes.plot(series.x, values, label=series.full_name, color=color, linewidth=1.0, markersize=2.5, **style)
    if plot.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    if plot.from_zero:
        axes.set_ylim(bottom=0)


def _bars(plot: Plot, axes: Any) -> None:
    names = list(dict.fromkeys(str(name) for series in plot.series for name in series.x))
    width = 0.8 / len(plot.series)
    for number, series in enumerate(plot.series):
        places = [names.index(str(name)) + width * (number - (len(plot.series) - 1) / 2) for name in series.x]
        axes.bar(places, series.y, width, label=series.full_name, color=PALETTE[series.color % len(PALETTE)])
    step = -(-len(names) // 16)  # at most 16 labels, which would otherwise overlap
    axes.set_xticks(range(0, len(names), step), names[::step])


def _rows(plot: Plot, axes: Any) -> None:
    names = plot.rows
    ends = dict.fromkeys(names, 0.0)
    for series in plot.series:
        for name, value in zip(map(str, series.y), series.x, strict=True):
            length, color = float(value or 0.0), PALETTE[series.color % len(PALETTE)]
            axes.barh(names.index(name), length, 0.6, left=ends[name], label=series.name, color=color)
            ends[name] += length
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")

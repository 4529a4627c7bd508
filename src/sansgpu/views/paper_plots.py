"""Draws plots for print with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sansgpu.config.extras import require
from sansgpu.views.plots import PALETTE, Plot

DASHES = ("-", "--", ":", "-.")
WIDTH, HEIGHT, DPI = 3.5, 2.5, 300  # inches of one column in a paper; dots per inch of png files
BAR_HEIGHT, LEGEND_HEIGHT = 0.3, 0.15  # inches per bar and per line of a legend below the plot
MAX_LEGEND_INSIDE = 3  # entries; a longer legend would hide the curves
_STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.5, "axes.axisbelow": True, "svg.fonttype": "none", "svg.hashsalt": "sansgpu",
}  # fmt: skip


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
    if plot.kind == "lines":
        _lines(plot, axes)
    elif plot.kind == "bars":
        _bars(plot, axes)
    else:
        _rows(plot, axes)
    axes.set_title(plot.title, fontsize=9)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    handles, names = axes.get_legend_handles_labels()
    named = {name: handle for handle, name in zip(handles, names, strict=True) if name}
    if plot.kind == "rows":
        drawn.set_figheight(0.9 + BAR_HEIGHT * len(axes.get_yticks()))
    if len(named) > MAX_LEGEND_INSIDE or (len(named) > 1 and plot.kind != "lines"):
        columns = 3 if plot.kind == "rows" else 2
        drawn.legend(named.values(), named.keys(), frameon=False, loc="outside lower center", ncols=columns)
        drawn.set_figheight(drawn.get_figheight() + LEGEND_HEIGHT * -(-len(named) // columns))
    elif len(named) > 1:
        axes.legend(named.values(), named.keys(), frameon=False)


def _lines(plot: Plot, axes: Any) -> None:
    for series in plot.series:
        values = [float("nan") if value is None else value for value in series.y]
        style = {"linestyle": DASHES[series.dash % len(DASHES)], "marker": "o" if series.marked else ""}
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

"""Renders self-contained HTML pages with plotly figures, and a run in a notebook cell."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup, escape

from sansgpu.config.errors import require
from sansgpu.config.wording import duration
from sansgpu.events.event import Event
from sansgpu.tasks.configuration import settings_of
from sansgpu.views.plots import PALETTE, Plot, Series

PLOT_HEIGHT, ROW_HEIGHT, ROWS_MARGIN = 300, 40, 60  # pixels
HOVER_PIXELS = 40  # maximum distance from a point at which its label is shown
DASHES = ("solid", "dash", "dot", "dashdot")
REDRAW_SECONDS = 1.0  # minimum time between two updates of a notebook cell


@dataclass(frozen=True)
class PlotlyFigure:
    """A plotly figure made by a different library."""

    name: str
    title: str
    json: str  # an object with `data` and `layout`
    note: str = ""
    wide: bool = True


@cache
def templates() -> Environment:
    """Returns the template environment, which escapes values in HTML."""
    environment = Environment(
        loader=PackageLoader("sansgpu.views"), autoescape=select_autoescape(["html"]), keep_trailing_newline=True
    )
    environment.globals.update(figure=as_json, palette=PALETTE)
    return environment


def page(template: str, plots: Sequence[Plot | PlotlyFigure], **values: Any) -> str:
    """Renders `template`, which extends page.html, and embeds plotly if there are plots."""
    library = Markup(_library()) if plots else ""
    return templates().get_template(template).render(plotly=library, plots=plots, **values)


def as_json(plot: Plot | PlotlyFigure) -> Markup:
    """Returns a plot as JSON that is safe in a script element. The page adds the colors of text and lines."""
    if isinstance(plot, PlotlyFigure):
        text = plot.json
    else:
        text = json.dumps(figure(plot), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def figure(plot: Plot) -> dict[str, Any]:
    """Returns the `data` and `layout` of a plotly figure."""
    axis = {"automargin": True, "zeroline": False, "title": {"standoff": 8}}
    x, y = ({**axis, "title": {"text": text, "standoff": 8}} for text in (plot.x, plot.y))
    if plot.log:
        x["type"] = y["type"] = "log"
    if plot.from_zero:
        y["rangemode"] = "tozero"
    names = {series.name for series in plot.series}
    layout: dict[str, Any] = {
        "xaxis": x,
        "yaxis": y,
        "height": PLOT_HEIGHT,
        "margin": {"l": 10, "r": 16, "t": 8, "b": 10},
        "hovermode": "closest" if plot.chart == "rows" else "x unified",
        "hoverdistance": HOVER_PIXELS,
        "showlegend": len(names) > 1 and plot.chart != "rows",  # plot.html shows their legend
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    }
    if plot.chart == "rows":
        y |= {"autorange": "reversed", "type": "category", "categoryorder": "array", "categoryarray": plot.rows}
        layout |= {"barmode": "stack", "height": ROWS_MARGIN + ROW_HEIGHT * len(plot.rows)}
    elif plot.chart == "bars":
        x["type"] = "category"
    seen: set[str] = set()
    data = []
    for series in plot.series:
        data.append(_trace(plot, series) | {"showlegend": series.name not in seen})
        seen.add(series.name)
    return {"data": data, "layout": layout}


def _trace(plot: Plot, series: Series) -> dict[str, Any]:
    color = PALETTE[series.color % len(PALETTE)]
    along = {plot.x: list(series.x), **{axis: list(values) for axis, values in series.along.items()}}
    trace = {
        "x": list(series.x),
        "y": list(series.y),
        "name": str(escape(series.name or series.of)),
        "legendgroup": series.name,
        "meta": {"run": series.run, **({"along": along} if series.along else {})},
    }
    if plot.chart == "rows":
        shown = "%{x:.4g} " + plot.x + f"<extra>{escape(series.full_name)}</extra>"
        return {**trace, "type": "bar", "orientation": "h", "marker": {"color": color}, "hovertemplate": shown}
    if plot.chart == "bars":
        return {**trace, "type": "bar", "marker": {"color": color}}
    if series.of and series.name:
        trace["hovertemplate"] = f"%{{y:.5g}}<extra>{escape(series.full_name)}</extra>"
    line = {"color": color, "width": 2 if series.marked else 1.6, "dash": DASHES[series.dash % len(DASHES)]}
    return {**trace, "type": "scatter", "mode": "lines+markers" if series.marked else "lines", "line": line}


def _library() -> str:
    require("an HTML report", "plotly")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


class NotebookView:
    """A sink for Jupyter: a progress bar, current figures and the last evaluations, updated in place."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._page, self._html = templates().get_template("notebook.html"), HTML
        self._events: dict[str, Any] = {"evaluations": [], "warnings": [], "step": {}, "end": {}, "start": {}}
        self._redrawn = 0.0
        self._handle = display(HTML("starting"), display_id=True)

    def emit(self, event: Event) -> None:
        name, known = event["event"], self._events
        if name in ("start", "step", "end"):
            known[name] = event
        elif name in ("eval", "warning"):
            known["evaluations" if name == "eval" else "warnings"].append(event)
        if name != "step" or time.monotonic() - self._redrawn >= REDRAW_SECONDS:
            self._redrawn = time.monotonic()
            metric = settings_of(str(known["start"].get("task"))).main_metric
            self._handle.update(self._html(self._page.render(**known, metric=metric, duration=duration)))

    def close(self) -> None:
        pass

"""report.md and report.html of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from sansgpu.watch.tables import count, gigabytes
from sansgpu.watch.terminal import clock, duration

Result = dict[str, Any]


def write_report(result: Result, folder: Path) -> None:
    """Write report.md and report.html. Raises OSError."""
    result = {**result, "time": datetime.now().strftime("%Y-%m-%d %H:%M")}
    pages = Environment(
        loader=PackageLoader("sansgpu.watch"), autoescape=select_autoescape(["html"]), trim_blocks=False
    )
    pages.globals.update(count=count, gigabytes=gigabytes, duration=duration, seconds=seconds)
    pages.globals["clock"] = lambda moment: clock(datetime.fromisoformat(moment))
    text = pages.get_template("bench.md").render(r=result)
    (folder / "report.md").write_text(text.strip() + "\n", encoding="utf-8")
    html = pages.get_template("bench.html").render(
        title=f"{result['name']}: measured", body=as_html(text), figures=_figures(result)
    )
    (folder / "report.html").write_text(html, encoding="utf-8")


def seconds(value: float) -> str:
    """As many digits as mean something."""
    if value >= 100:
        return duration(value)
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def as_html(text: str) -> Markup:
    """Markdown as a part of a page."""
    from markdown_it import MarkdownIt

    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _figures(result: Result) -> list[tuple[str, Markup]]:
    """Plots of what was measured."""
    from plotly import graph_objects as go

    step = result["step_seconds"]["median"]
    parts = list(result["breakdown"])
    steps = [p["steps"] for p in result["projections"]]
    hours = [p["seconds"] / 3600 for p in result["projections"]]
    found = [
        ("Seconds of every measured step", go.Figure(go.Scatter(y=result["all_step_seconds"], mode="lines+markers"))),
        (
            "Where a step goes, in seconds, beside what the machine allows at best",
            go.Figure(
                [
                    go.Bar(name="measured", x=parts, y=[result["breakdown"][p] * step for p in parts]),
                    go.Bar(name="limit", x=parts, y=[result["limits"][p] * step for p in parts]),
                ]
            ),
        ),
        ("Hours from nothing, by steps", go.Figure(go.Scatter(x=steps, y=hours, mode="lines+markers"))),
    ]
    found[0][1].update_yaxes(rangemode="tozero")
    found[2][1].update_xaxes(type="log").update_yaxes(type="log")
    rows = [row for row in result["what_if"] if "speedup" in row]
    if rows:
        names, speeds = [row["name"] for row in rows], [row["speedup"] for row in rows]
        found.append(
            ("What if: speed over the configuration as it is", go.Figure(go.Bar(y=names, x=speeds, orientation="h")))
        )
        found[-1][1].update_yaxes(autorange="reversed")
    return inlined(found)


def inlined(found: Sequence[tuple[str, Any]], height: int = 320) -> list[tuple[str, Markup]]:
    """Captions and plots as parts of a page, in colours that do on light and dark, the library in the first of
    them, so that the page needs no network.
    """
    clear = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font_color": "#888", "height": height}
    pages = []
    for number, (caption, figure) in enumerate(found):
        figure.update_layout(margin={"l": 40, "r": 10, "t": 10, "b": 40}, **clear)
        figure.update_xaxes(gridcolor="#8884", zerolinecolor="#8884", automargin=True)
        figure.update_yaxes(gridcolor="#8884", zerolinecolor="#8884", automargin=True)
        page = figure.to_html(
            full_html=False, include_plotlyjs=number == 0, config={"responsive": True, "displayModeBar": False}
        )
        pages.append((caption, Markup(page)))
    return pages

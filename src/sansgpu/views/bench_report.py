"""Writes report.md and report.html of `sansgpu bench`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from sansgpu.config.extras import is_installed
from sansgpu.config.tasks import settings_of
from sansgpu.config.wording import counted
from sansgpu.files.atomic import write_text
from sansgpu.views.bench_table import BenchResult, speedup_text, validation_texts
from sansgpu.views.page import page, templates
from sansgpu.views.plots import Plot, Series
from sansgpu.views.tables import count, storage
from sansgpu.views.terminal import clock, duration


def write_report(result: BenchResult, folder: Path) -> list[str]:
    """Writes report.md and, if plotly is installed, report.html. Returns the names of the files. Raises OSError."""
    facts = {**result, "time": datetime.now().strftime("%Y-%m-%d %H:%M")}
    words = {"count": count, "counted": counted, "storage": storage, "duration": duration, "seconds": seconds}
    words["speedup_text"] = speedup_text
    varying = settings_of(result["task"]).varying_length
    text = (
        templates()
        .get_template("bench.md")
        .render(r=facts, varying=varying, clock=_clock, validation=validation_texts(result), **words)
    )
    write_text(folder / "report.md", text.strip() + "\n")
    if not is_installed("plotly"):
        return ["report.md"]
    plots, title = _plots(result), f"{result['name']}: benchmark"
    write_text(folder / "report.html", page("bench.html", plots, title=title, body=as_html(text)))
    return ["report.md", "report.html"]


def seconds(value: float) -> str:
    """Formats a time with three significant digits."""
    if value >= 100:
        return duration(value)
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _clock(moment: str) -> str:
    return clock(datetime.fromisoformat(moment))


def as_html(text: str) -> Markup:
    """Renders Markdown to HTML, without passing through raw HTML."""
    from markdown_it import MarkdownIt

    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _plots(result: BenchResult) -> list[Plot]:
    step = result["step_seconds"]["median"]
    parts, times = list(result["breakdown"]), result["all_step_seconds"]
    shares_of = {"measured": result["breakdown"], "limit": result["limits"]}
    seconds_of = {name: [shares[p] * step for p in parts] for name, shares in shares_of.items()}
    steps = [p["steps"] for p in result["projections"]]
    hours = [p["seconds"] / 3600 for p in result["projections"]]
    measured = [Series("", list(range(1, len(times) + 1)), times, marked=True)]
    shares = [Series(name, parts, values, color=index) for index, (name, values) in enumerate(seconds_of.items())]
    found = [
        Plot("steps", "Every measured step", "step", "seconds", measured, from_zero=True),
        Plot("parts", "Time per step, measured and at the hardware limit", "", "seconds", shares, "bars"),
        Plot(
            "hours",
            "Total time from a cold start",
            "steps",
            "hours",
            [Series("", steps, hours, marked=True)],
            log=True,
        ),
    ]
    rows = [row for row in result["what_if"] if "speedup" in row]
    if rows:
        series = [Series("", [row["speedup"] for row in rows], [row["name"] for row in rows])]
        found.append(Plot("what_if", "What if", "speedup over the given configuration", "", series, "rows"))
    return found

"""The results of `sansgpu bench`: their tables, and report.md and report.html."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from markupsafe import Markup
from rich.console import Console

from sansgpu.config.errors import is_installed
from sansgpu.config.wording import count, counted, duration
from sansgpu.events.event import metric_texts
from sansgpu.files.atomic import write_text
from sansgpu.planning.results import BenchResult, ForwardResult, Variation
from sansgpu.tasks.configuration import settings_of
from sansgpu.views.page import page, templates
from sansgpu.views.plots import Plot, Series
from sansgpu.views.tables import grid, pace, percent, print_table, rate, storage, table_of
from sansgpu.views.terminal import clock_of


def print_bench(console: Console, result: BenchResult) -> None:
    """Prints a summary of `bench`; its report has the details."""
    table = grid()
    step, build = result["step_seconds"], result["build_seconds"]
    table.add_row(
        "step",
        f"{step['median']:.3g} s ({step['min']:.3g} to {step['max']:.3g}) of {result['tokens_per_step']:,} tokens: "
        f"{result['micro_batch']} x {result['gradient_accumulation_steps']} "
        f"{'examples of up to' if settings_of(result['task']).varying_length else 'windows of'} {result['window']}",
    )
    table.add_row(
        "speed",
        f"{pace(result['tokens_per_second'])}, {rate(result['flops_per_second'])}, MFU {percent(result['mfu'])} of "
        f"{rate(result['gemm_flops_per_second'])}",
    )
    table.add_row("peak memory", storage(result["peak_rss_bytes"]))
    table.add_row("setup", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in build.items()))
    shares = result["breakdown"].items()
    table.add_row("step time", ", ".join(f"{part} {share:.0%}" for part, share in shares))
    for text in validation_texts(result):
        table.add_row("validation", text)
    for text in result["advice"]:
        table.add_row("advice", text)
    for row in result["what_if"][1:]:
        if "speedup" in row:
            table.add_row("what if", f"{row['name']}: {speedup_text(row)}, trade-off: {row['gives_up']}")
        else:
            table.add_row("what if", f"{row['name']}: not measured, because {row['problem']}", style="yellow")
    for projection in result["projections"]:
        finish = clock_of(projection["done"])
        table.add_row(f"{projection['steps']:,} steps", f"{duration(projection['seconds'])}, done {finish}")
    for text in result["disturbances"]:
        table.add_row("disturbance", text, style="yellow")
    table.add_row("written", ", ".join(result["files"]))
    console.print(table)


def is_measurable(row: Variation) -> bool:
    """Returns whether the steps of a variation differ from the given configuration's by more than their noise."""
    low, high = row["speedup_range"]
    return not low <= 1 <= high


def speedup_text(row: Variation) -> str:
    """Formats a speedup with its range over the timed steps, or says that there is no measurable difference."""
    low, high = row["speedup_range"]
    if low == high:
        return f"{row['speedup']:.2f}x"
    steps = counted(len(row["all_step_seconds"]), "step")
    spread = f"{low:.2f}x to {high:.2f}x in {steps}"
    return f"{row['speedup']:.2f}x ({spread})" if is_measurable(row) else f"no measurable difference ({spread})"


def validation_texts(result: BenchResult) -> list[str]:
    """Describes the task's validation metrics."""
    return metric_texts(result["validation"], settings_of(result["task"]))


def print_forward(console: Console, result: ForwardResult) -> None:
    columns = "batch", "seconds", "tokens/s", "GFLOP/s", "MFU", "memory"
    table = table_of(columns, title=f"{count(result['parameters'])} parameters, forward only")
    for row in result["forward"]:
        table.add_row(
            f"{row['batch_size']} x {row['window']}",
            f"{row['seconds']:.3g}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second'] / 1e9:,.0f}",
            percent(row["mfu"]),
            storage(row["peak_rss_bytes"]),
        )
    print_table(console, table)


def write_report(result: BenchResult, folder: Path) -> list[str]:
    """Writes report.md and, if plotly is installed, report.html. Returns the names of the files. Raises OSError."""
    facts = {**result, "time": datetime.now().strftime("%Y-%m-%d %H:%M")}
    words = {"count": count, "counted": counted, "storage": storage, "duration": duration, "seconds": seconds}
    words["speedup_text"] = speedup_text
    varying = settings_of(result["task"]).varying_length
    text = (
        templates()
        .get_template("bench.md")
        .render(r=facts, varying=varying, clock=clock_of, validation=validation_texts(result), **words)
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
        Plot("steps", "Duration of every measured step", "step", "seconds", measured, from_zero=True),
        Plot("parts", "Time per step, measured and at the hardware limit", "", "seconds", shares, "bars"),
        Plot(
            "hours", "Total time from a cold start", "steps", "hours", [Series("", steps, hours, marked=True)], log=True
        ),
    ]
    rows = [row for row in result["what_if"] if "speedup" in row]
    if rows:
        series = [Series("", [row["speedup"] for row in rows], [row["name"] for row in rows])]
        found.append(Plot("what_if", "What if", "speedup over the given configuration", "", series, "rows"))
    return found

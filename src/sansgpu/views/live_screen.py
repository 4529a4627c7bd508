"""Renders the live view for any terminal size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import mean
from textwrap import wrap
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sansgpu.config import TaskSettings
from sansgpu.config.wording import duration
from sansgpu.events.escape import printable, printable_line
from sansgpu.events.event import NEAR_LIMIT, Event, current_metrics
from sansgpu.tasks.configuration import settings_of
from sansgpu.views.metric_curve import TRAINING, VALIDATION, Point, best_point, metric_curve
from sansgpu.views.tables import percent
from sansgpu.views.terminal import clock

KEYS = (
    ("p", "pause", "pause"),
    ("s", "save now", "save"),
    ("e", "evaluate now", "eval"),
    ("q", "save and stop", "end"),
)
WIDE = 104  # minimum terminal columns for placing the table next to the curve
CURVE_SECONDS = 10.0  # minimum time between redraws of the curve
MIN_CURVE_ROWS = 5
SAMPLE_ROWS, NEWS_ROWS = 4, 3  # the sample includes its frame
_BLOCKS = "▁▂▃▄▅▆▇█"
_MAX_LISTED_CORES = 8  # with more, only the mean load is shown

Cell = tuple[str, RenderableType]  # a name and its value


@dataclass
class ScreenState:
    """The current state of a run."""

    start: Event = field(default_factory=dict)
    step: Event = field(default_factory=dict)  # the last one
    evaluation: Event = field(default_factory=dict)
    training: list[Point] = field(default_factory=list)  # the values of the main metric by step
    validation: list[Point] = field(default_factory=list)
    news: list[tuple[str, str]] = field(default_factory=list)  # (text, style)
    snapshot: tuple[str, float] | None = None  # name and time.monotonic() of the last snapshot
    system: dict[str, Any] = field(default_factory=dict)
    stepped: float = 0.0  # time.monotonic() of the last step event
    state: str = "training"
    keys: bool = True  # True if keys can be read
    plot: tuple[object, float, RenderableType] = (None, 0.0, "")  # size, time.monotonic(), rendered curve

    @property
    def settings(self) -> TaskSettings:
        return settings_of(str(self.start.get("task")))


def screen(shown: ScreenState, width: int, height: int) -> RenderableType:
    """Renders the whole terminal, `width` columns by `height` rows."""
    top, bottom = [_headline(shown, width), _bar(shown, width)], [_footer(shown, width)]
    wide = width >= WIDE
    figures = _Cells([*_progress(shown), *_machine(shown.system)], columns=1 if wide or width < 70 else 2)
    rows = height - 3
    below, rows = _below(shown, width, rows, least=MIN_CURVE_ROWS + 2 + (0 if wide else figures.rows))
    if wide:
        more = _Cells([*_progress(shown), *_machine(shown.system), *_details(shown)], columns=1)
        middle = _SideBySide(_curve(shown, width - 46, rows), more.panel(rows), 46)
        return Group(*top, middle, *below, *bottom)
    parts: list[RenderableType] = []
    if rows - figures.rows >= MIN_CURVE_ROWS + 2:
        parts.append(_curve(shown, width, rows - figures.rows))
    return Group(*top, *parts, figures.panel(min(rows, figures.rows)), *below, *bottom)


def _headline(shown: ScreenState, width: int) -> Text:
    step, total = (shown.step or shown.start).get("step", 0), _total(shown)
    place = f"step {step:,}" + (f" of {total:,}" if total else "")
    state_style = {"training": "bold green", "paused": "bold yellow"}.get(shown.state, "bold cyan")
    name = printable_line(str(shown.start.get("output_dir", "")))  # before the layout, because escaping lengthens it
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f" {shown.state} ", state_style + " reverse")
    line.append(f"  {place}", "bold")
    if shown.step:
        finish = datetime.now() + timedelta(seconds=_eta(shown))
        line.append(f"   {duration(_eta(shown))} left, done {clock(finish)}")
    if width - line.cell_len > len(name) + 3:
        line.append(f"   {name}", "dim")
    return line


def _total(shown: ScreenState) -> int | None:
    last = shown.step or shown.start
    total: int | None = last.get("expected_steps") or last.get("total_steps")
    return total


def _eta(shown: ScreenState) -> float:
    passed = 0.0 if shown.state == "paused" else time.monotonic() - shown.stepped
    return max(0.0, float(shown.step["eta_seconds"]) - passed)


def _bar(shown: ScreenState, width: int) -> RenderableType:
    total, done = _total(shown), (shown.step or shown.start).get("step", 0)
    line = Table.grid()  # adds the line end that ProgressBar lacks
    line.add_row(ProgressBar(total=total or 100, completed=float(done if total else 0), width=width))
    return line


def _footer(shown: ScreenState, width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for key, what, short in KEYS if shown.keys else ():
        line.append(f" {key} ", "reverse").append(f" {what}   " if width >= 70 else f" {short}  ")
    if not shown.keys:
        line.append("Ctrl-C saves and stops", "dim")
    return line


class _SideBySide:
    """Renders two parts of the same height side by side, faster than a table, which measures them first."""

    def __init__(self, left: RenderableType, right: RenderableType, right_width: int) -> None:
        self._left, self._right, self._right_width = left, right, right_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = options.max_width - self._right_width, self._right_width
        parts = (self._left, self._right)
        drawn = [console.render_lines(p, options.update(width=w)) for p, w in zip(parts, widths, strict=True)]
        for lines in zip(*drawn, strict=True):
            yield from (segment for line in lines for segment in line)
            yield Segment.line()


class _Cells:
    """A table of names and values with a known number of rows."""

    def __init__(self, cells: Sequence[Cell], columns: int) -> None:
        self._cells, self._columns = cells, columns
        self.rows = -(-len(cells) // columns) + 2  # including the frame

    def panel(self, rows: int) -> RenderableType:
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(self._columns):
            table.add_column(width=13, no_wrap=True, style="dim")
            table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        lines = -(-len(self._cells) // self._columns)
        for line in range(min(lines, rows - 2)):
            row = [self._cells[place] for place in range(line, len(self._cells), lines)]
            table.add_row(*(cell for pair in row for cell in pair))
        return Panel(table, height=rows, padding=(0, 1), border_style="dim")


def _progress(shown: ScreenState) -> list[Cell]:
    step, evaluation, cells = shown.step, shown.evaluation, list[Cell]()
    if step:
        cells += [
            ("speed, MFU", f"{step['tokens_per_second']:,.0f} tokens/s, {percent(step['mfu'])}"),
            ("step time", f"{_seconds(step['step_seconds'])}, {1 / step['step_seconds']:.3g} it/s"),
            ("trained on", f"{step['tokens'] / 1e6:,.1f}M tokens"),
            ("learning rate", f"{step['lr']:.3g}"),
            ("gradient norm", f"{step['grad_norm']:.3g}"),
        ]
    metrics = current_metrics(evaluation, shown.settings)
    cells += [(name, f"{value} at {evaluation['step']:,}") for name, value in metrics]
    if shown.snapshot:
        name, when = shown.snapshot
        cells.append(("snapshot", f"{name}, {duration(time.monotonic() - when)} ago"))
    return cells


def _machine(system: dict[str, Any]) -> list[Cell]:
    if not system:
        return []
    cores = system["core_percent"]
    blocks = "".join(_BLOCKS[min(7, int(percent / 12.5))] for percent in cores)
    each = " ".join(f"{percent:.0f}" for percent in cores) + "%"
    load = each if len(cores) <= _MAX_LISTED_CORES else f"{mean(cores):.0f}% of {len(cores)}"
    others = system["other_percent"]
    others_load = f", others {others:.0f}%" if others >= 10 else ""
    limit, left = system["memory_limit_bytes"], system["memory_available_bytes"]
    near = left < NEAR_LIMIT * limit
    used = f"{system['rss_bytes'] / 1e9:.1f} GB, {left / 1e9:.1f} of {limit / 1e9:.0f} left"
    temperature, clock_rate, watts = system["temperature_celsius"], system["frequency_hz"], system["watts"]
    physical = [
        f"{temperature:.0f} °C" if temperature else "",
        f"{clock_rate / 1e9:.1f} GHz" if clock_rate else "",
        f"{watts:.0f} W" if watts else "",
    ]
    cells: list[Cell] = [
        ("cores", Text.assemble((blocks, "green"), f" {load}{others_load}")),
        ("memory", Text(used, "bold red" if near else "")),
    ]
    if any(physical):
        cells.append(("processor", ", ".join(part for part in physical if part)))
    return cells


def _details(shown: ScreenState) -> list[Cell]:
    """Returns additional cells for wide terminals."""
    cells, system = list[Cell](), shown.system
    phases: dict[str, float] = shown.step.get("phase_seconds", {})
    whole = sum(phases.values())
    for phase, spent in phases.items():
        if spent > 0.005 * whole:
            cells.append(("" if cells else "step phases", f"{spent / whole:>4.0%} {phase}"))
    if system:
        rates = (("disk_read", "read"), ("disk_write", "written"))
        values = [(system[f"{key}_bytes_per_second"], what) for key, what in rates]
        moving = [f"{rate / 1e6:,.0f} MB/s {what}" for rate, what in values if rate and rate > 1e6]
        free = system["disk_free_bytes"]
        cells.append(("disk", ", ".join([*moving, *([f"{free / 1e9:,.0f} GB free"] if free else [])])))
        cells.append(("page faults", f"{system['major_faults_per_second'] or 0:,.0f} major per second"))
        if system["swap_bytes"]:
            cells.append(("swap", f"{system['swap_bytes'] / 1e9:.1f} GB in use"))
    return cells


def _below(shown: ScreenState, width: int, rows: int, least: int) -> tuple[list[RenderableType], int]:
    """Returns panels for the last sample and messages if they fit, and the number of remaining rows."""
    parts: list[RenderableType] = []
    news = _news(shown, width - 4)
    if news and rows - len(news) - 2 >= least:
        parts.append(Panel(Group(*news), height=len(news) + 2, padding=(0, 1), border_style="dim"))
        rows -= len(news) + 2
    sample = shown.evaluation.get("sample")
    if sample and rows - SAMPLE_ROWS >= least:
        text = Text(" ".join(printable(sample).split()), "italic", overflow="ellipsis")
        parts.insert(0, Panel(text, height=SAMPLE_ROWS, padding=(0, 1), border_style="dim", title="sample"))
        rows -= SAMPLE_ROWS
    return parts, rows


def _news(shown: ScreenState, width: int) -> list[Text]:
    """Returns the last messages that fit: the newest one wrapped, earlier ones truncated to one line."""
    lines: list[Text] = []
    for number, (message, style) in enumerate(reversed(shown.news[-NEWS_ROWS:])):
        text = printable_line(message)
        wrapped = [Text(line, style) for line in wrap(text, width)] if number == 0 else [
            Text(text, style, no_wrap=True, overflow="ellipsis")
        ]  # fmt: skip
        if len(lines) + len(wrapped) > NEWS_ROWS:
            break
        lines = wrapped + lines
    return lines


def _curve(shown: ScreenState, width: int, rows: int) -> RenderableType:
    metric = shown.settings.main_metric
    title = Text(f"{metric.label}  ", "bold")
    if shown.training:
        title.append(f"training {metric.shown(shown.training[-1][1])}", TRAINING)
    if shown.validation:
        best_step, best = best_point(metric, shown.validation)
        title.append(f"  validation {metric.shown(shown.validation[-1][1])}", VALIDATION)
        title.append(f" (best {metric.shown(best)} at {best_step:,})", "dim")
    body: RenderableType = Text("Waiting for the first steps.", "dim")
    if len(shown.training) > 1:
        size, now = (width, rows, len(shown.validation)), time.monotonic()
        if shown.plot[0] != size or now - shown.plot[1] > CURVE_SECONDS:  # drawing it takes as long as everything else
            curve = metric_curve(metric, shown.training, shown.validation, _total(shown), width - 4, rows - 2)
            shown.plot = size, now, curve
        body = shown.plot[2]
    return Panel(body, title=title, title_align="left", height=rows, padding=(0, 1), border_style="dim")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"

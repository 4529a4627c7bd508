"""What the live view shows: a picture of what is known, for any size of terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import mean
from textwrap import wrap
from typing import Any

import plotille
from rich.ansi import AnsiDecoder
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from sansgpu.watch.escape import printable, printable_line
from sansgpu.watch.events import NEAR_LIMIT, Event
from sansgpu.watch.terminal import clock, duration

KEYS = (("p", "pause", "pause"), ("s", "save now", "save"), ("e", "evaluate now", "eval"), ("q", "save and end", "end"))
WIDE = 104  # columns from which figures stand beside the curve
CURVE_SECONDS = 10.0  # for which a curve stands as it was drawn
LEAST_CURVE = 5  # rows
SAMPLE_ROWS, NEWS_ROWS = 4, 3  # the sample with its frame
TRAINING, VALIDATION = "cyan", "magenta"
_BLOCKS = "▁▂▃▄▅▆▇█"
_SINGLE_CORES = 8  # that are told one by one

_METRICS = {  # of evaluations, besides the loss
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "f1": ("F1", "{:.1f} %"),
    "exact_match": ("exact match", "{:.1f} %"),
    "mlm_acc": ("tokens right", "{:.1%}"),
    "mnm_acc": ("leaves right", "{:.1%}"),
}

Point = tuple[int, float]
Cell = tuple[str, RenderableType]  # a name and its value


@dataclass
class Shown:
    """All that is known of the run now."""

    start: Event = field(default_factory=dict)
    step: Event = field(default_factory=dict)  # the last one
    evaluation: Event = field(default_factory=dict)
    training: list[Point] = field(default_factory=list)  # steps and losses
    validation: list[Point] = field(default_factory=list)
    news: list[tuple[str, str]] = field(default_factory=list)  # texts and their styles
    snapshot: tuple[str, float] | None = None  # the last one's name, and when (time.monotonic)
    system: dict[str, Any] = field(default_factory=dict)
    stepped: float = 0.0  # when the last step event came (time.monotonic)
    state: str = "training"
    keys: bool = True  # whether they are listened to
    plot: tuple[object, float, RenderableType] = (None, 0.0, "")  # its room, when it was drawn (time.monotonic), itself


def screen(shown: Shown, width: int, height: int) -> RenderableType:
    """The whole terminal, `width` columns by `height` rows."""
    top, bottom = [_headline(shown, width), _bar(shown, width)], [_footer(shown, width)]
    wide = width >= WIDE
    figures = _Figures([*_course(shown), *_machine(shown.system)], columns=1 if wide or width < 70 else 2)
    rows = height - 3
    below, rows = _below(shown, width, rows, least=LEAST_CURVE + 2 + (0 if wide else figures.rows))
    if wide:
        more = _Figures([*_course(shown), *_machine(shown.system), *_details(shown)], columns=1)
        middle = _Beside(_curve(shown, width - 46, rows), more.panel(rows), 46)
        return Group(*top, middle, *below, *bottom)
    parts: list[RenderableType] = []
    if rows - figures.rows >= LEAST_CURVE + 2:
        parts.append(_curve(shown, width, rows - figures.rows))
    return Group(*top, *parts, figures.panel(min(rows, figures.rows)), *below, *bottom)


def _headline(shown: Shown, width: int) -> Text:
    step, total = (shown.step or shown.start).get("step", 0), _total(shown)
    place = f"step {step:,}" + (f" of {total:,}" if total else "")
    state_style = {"training": "bold green", "paused": "bold yellow"}.get(shown.state, "bold cyan")
    name = printable_line(str(shown.start.get("output_dir", "")))  # longer than as it is: before the layout
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f" {shown.state} ", state_style + " reverse")
    line.append(f"  {place}", "bold")
    if shown.step:
        finish = datetime.now() + timedelta(seconds=_eta(shown))
        line.append(f"   {duration(_eta(shown))} left, done {clock(finish)}")
    if width - line.cell_len > len(name) + 3:
        line.append(f"   {name}", "dim")
    return line


def _total(shown: Shown) -> int | None:
    total: int | None = (shown.step or shown.start).get("total_steps")
    return total


def _eta(shown: Shown) -> float:
    passed = 0.0 if shown.state == "paused" else time.monotonic() - shown.stepped
    return max(0.0, float(shown.step["eta_seconds"]) - passed)


def _bar(shown: Shown, width: int) -> RenderableType:
    total, done = _total(shown), (shown.step or shown.start).get("step", 0)
    line = Table.grid()  # which ends the line that a bar leaves open
    line.add_row(ProgressBar(total=total or 100, completed=float(done if total else 0), width=width))
    return line


def _footer(shown: Shown, width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for key, what, short in KEYS if shown.keys else ():
        line.append(f" {key} ", "reverse").append(f" {what}   " if width >= 70 else f" {short}  ")
    if not shown.keys:
        line.append("Ctrl-C saves and ends", "dim")
    return line


class _Beside:
    """Two things of the same height next to each other; a table would measure each before it is drawn."""

    def __init__(self, left: RenderableType, right: RenderableType, right_width: int) -> None:
        self._left, self._right, self._right_width = left, right, right_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = options.max_width - self._right_width, self._right_width
        parts = (self._left, self._right)
        drawn = [console.render_lines(p, options.update(width=w)) for p, w in zip(parts, widths, strict=True)]
        for lines in zip(*drawn, strict=True):
            yield from (segment for line in lines for segment in line)
            yield Segment.line()


class _Figures:
    """Rows of names and values, which know how many they are."""

    def __init__(self, cells: Sequence[Cell], columns: int) -> None:
        self._cells, self._columns = cells, columns
        self.rows = -(-len(cells) // columns) + 2  # with the frame

    def panel(self, rows: int) -> RenderableType:
        """A frame of so many rows."""
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(self._columns):
            table.add_column(width=13, no_wrap=True, style="dim")
            table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        lines = -(-len(self._cells) // self._columns)
        for line in range(min(lines, rows - 2)):
            row = [self._cells[place] for place in range(line, len(self._cells), lines)]
            table.add_row(*(cell for pair in row for cell in pair))
        return Panel(table, height=rows, padding=(0, 1), border_style="dim")


def _course(shown: Shown) -> list[Cell]:
    """How learning goes."""
    step, told, cells = shown.step, shown.evaluation, list[Cell]()
    if step:
        cells += [
            ("speed", f"{step['tokens_per_second']:,.0f} tokens/s"),
            ("a step", f"{_seconds(step['step_seconds'])}, MFU {step['mfu']:.0%}"),
            ("learned from", f"{step['tokens'] / 1e6:,.1f}M tokens"),
            ("learning rate", f"{step['lr']:.3g}"),
            ("gradient norm", f"{step['grad_norm']:.3g}"),
        ]
    for key, (name, form) in _METRICS.items():
        if told.get(key) is not None:
            cells.append((name, f"{form.format(told[key])} at {told['step']:,}"))
    if shown.snapshot:
        name, when = shown.snapshot
        cells.append(("snapshot", f"{name}, {duration(time.monotonic() - when)} ago"))
    return cells


def _machine(system: dict[str, Any]) -> list[Cell]:
    """How the machine bears it."""
    if not system:
        return []
    cores = system["core_percent"]
    blocks = "".join(_BLOCKS[min(7, int(percent / 12.5))] for percent in cores)
    alone = " ".join(f"{percent:.0f}" for percent in cores) + " %"
    told = alone if len(cores) <= _SINGLE_CORES else f"{mean(cores):.0f} % of {len(cores)}"
    others = system["other_percent"]
    beside = f", others {others:.0f} %" if others >= 10 else ""
    limit, left = system["memory_limit_bytes"], system["memory_available_bytes"]
    near = left < NEAR_LIMIT * limit
    used = f"{system['rss_bytes'] / 1e9:.1f} GB, {left / 1e9:.1f} of {limit / 1e9:.0f} left"
    heat, clock_rate, watts = system["temperature_celsius"], system["frequency_hz"], system["watts"]
    physical = [
        f"{heat:.0f} °C" if heat else "",
        f"{clock_rate / 1e9:.1f} GHz" if clock_rate else "",
        f"{watts:.0f} W" if watts else "",
    ]
    cells: list[Cell] = [
        ("cores", Text.assemble((blocks, "green"), f" {told}{beside}")),
        ("memory", Text(used, "bold red" if near else "")),
    ]
    if any(physical):
        cells.append(("processor", ", ".join(part for part in physical if part)))
    return cells


def _details(shown: Shown) -> list[Cell]:
    """What else there is to know, where there is room."""
    cells, system = list[Cell](), shown.system
    phases: dict[str, float] = shown.step.get("phase_seconds", {})
    whole = sum(phases.values())
    for phase, spent in phases.items():
        if spent > 0.005 * whole:
            cells.append(("" if cells else "of a step", f"{spent / whole:>4.0%} {phase}"))
    if system:
        rates = (("disk_read", "read"), ("disk_write", "written"))
        told = [(system[f"{key}_bytes_per_second"], what) for key, what in rates]
        moving = [f"{rate / 1e6:,.0f} MB/s {what}" for rate, what in told if rate and rate > 1e6]
        free = system["disk_free_bytes"]
        cells.append(("disk", ", ".join([*moving, *([f"{free / 1e9:,.0f} GB free"] if free else [])])))
        cells.append(("page faults", f"{system['major_faults_per_second'] or 0:,.0f} a second from the disk"))
        if system["swap_bytes"]:
            cells.append(("swap", f"{system['swap_bytes'] / 1e9:.1f} GB in use"))
    return cells


def _below(shown: Shown, width: int, rows: int, least: int) -> tuple[list[RenderableType], int]:
    """The last sample and the last news, where there is room; and the rows that are left."""
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


def _news(shown: Shown, width: int) -> list[Text]:
    """The last lines that fit: the newest whole, those before it cut to one line."""
    lines: list[Text] = []
    for number, (said, style) in enumerate(reversed(shown.news[-NEWS_ROWS:])):
        text = printable_line(said)
        wrapped = [Text(line, style) for line in wrap(text, width)] if number == 0 else [
            Text(text, style, no_wrap=True, overflow="ellipsis")
        ]  # fmt: skip
        if len(lines) + len(wrapped) > NEWS_ROWS:
            break
        lines = wrapped + lines
    return lines


def _curve(shown: Shown, width: int, rows: int) -> RenderableType:
    """Training and validation loss over steps."""
    title = Text("loss  ", "bold")
    if shown.training:
        title.append(f"training {shown.training[-1][1]:.4f}", TRAINING)
    if shown.validation:
        best_step, best = min(shown.validation, key=lambda point: point[1])
        title.append(f"  validation {shown.validation[-1][1]:.4f}", VALIDATION)
        title.append(f" (best {best:.4f} at {best_step:,})", "dim")
    body: RenderableType = Text("The first steps are under way.", "dim")
    if len(shown.training) > 1:
        room, now = (width, rows, len(shown.validation)), time.monotonic()
        if shown.plot[0] != room or now - shown.plot[1] > CURVE_SECONDS:  # drawing it takes as long as all else
            shown.plot = room, now, _plot(shown, width - 4, rows - 2)
        body = shown.plot[2]
    return Panel(body, title=title, title_align="left", height=rows, padding=(0, 1), border_style="dim")


def _plot(shown: Shown, width: int, rows: int) -> RenderableType:
    training, validation = _thinned(shown.training, 2 * width), _thinned(shown.validation, 2 * width)
    high = max(loss for _, loss in training[len(training) // 10 :])  # the first fall would flatten all that follows
    low = min(loss for _, loss in (*training, *validation))
    margin = 0.03 * (high - low) or 0.01 * abs(high) or 1.0
    labels = [f"{high:.2f}", f"{low:.2f}"]
    first, last = training[0][0], _total(shown) or training[-1][0]
    figure = plotille.Figure()
    figure.width, figure.height = width - max(map(len, labels)) - 1, rows - 1
    figure.color_mode, figure.with_colors, figure.origin = "names", True, False
    figure.with_x_axis = figure.with_y_axis = False
    figure.set_x_limits(first, max(last, first + 1))
    figure.set_y_limits(low - margin, high + margin)
    for points, colour in ((training, TRAINING), (validation, VALIDATION)):
        if shows := [point for point in points if point[1] <= high + margin]:
            figure.plot(*zip(*shows, strict=True), lc=colour)
    lines, broad = list(AnsiDecoder().decode(figure.show())), max(map(len, labels))
    ends = f"step {first:,}", f"{last:,}"
    axis = ends[0] + ends[1].rjust(max(1, figure.width - len(ends[0])))
    drawn = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        label = labels[0] if number == 0 else labels[1] if number == len(lines) - 1 else ""
        drawn.append(f"{label:>{broad}} ", "dim").append_text(line).append("\n")
    return drawn.append(" " * (broad + 1) + axis, "dim")


def _thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """At most `most` points: means of neighbours, which keep what the eye follows."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], mean(loss for _, loss in group)) for group in groups]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"

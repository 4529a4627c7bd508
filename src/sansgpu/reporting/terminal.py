"""Prints training events and progress to a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.segment import Segment
from rich.text import Text

from sansgpu.config import TaskSettings
from sansgpu.config.by_task import DEFAULT_TASK, settings_of
from sansgpu.reporting.escape import printable, printable_line
from sansgpu.reporting.events import Event, current_metrics, metrics_in
from sansgpu.reporting.jsonl import redirect_to_null
from sansgpu.reporting.tables import count, counted

REDRAWS_PER_SECOND = 4
MIN_SHOWN_BYTES = 50_000
DESCRIPTION = TextColumn("{task.description}", markup=False)  # columns of a progress bar
FIGURES = TextColumn("{task.fields[figures]}", markup=False)


class RunConsole(Console):
    """A console that prints untrusted text safely: without control characters, markup or emoji codes.

    If its reader exits, as `head` does, the run continues; rich's console would end the process.
    """

    def __init__(self, *, stderr: bool = False, forwarded: bool = False, **options: Any) -> None:
        """`forwarded`: a launcher forwards the output, so it gets neither colors nor moving bars."""
        if forwarded:
            options["force_terminal"] = False
        super().__init__(stderr=stderr, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escapes control characters. All output passes through here, including the live view and progress bars."""
        for segment in super().render(renderable, options):
            plain = segment.control or segment.text.isprintable()
            yield segment if plain else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        self.quiet = True
        redirect_to_null(self.file)


class Terminal:
    """A sink that prints events as plain lines."""

    def __init__(self, console: Console, settings: TaskSettings | None = None) -> None:
        """`settings` are those of the task. Default: according to the start event."""
        self._console, self._settings = console, settings or settings_of(DEFAULT_TASK)
        self._total = 0

    def emit(self, event: Event) -> None:
        handlers: dict[str, Callable[[Event], None]] = {
            "start": self._start,
            "step": self._step,
            "eval": self._eval,
            "snapshot": lambda e: self._print(f"snapshot {e['path']}"),
            "warning": lambda e: self._print(f"warning: {e['message']}", style="yellow"),
            "end": self._end,
        }
        handlers[event["event"]](event)

    def close(self) -> None:
        pass

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _start(self, event: Event) -> None:
        self._total, self._settings = event["total_steps"] or 0, settings_of(event["task"])
        resumed = f", resumed from {event['resumed_from']}" if event.get("resumed_from") else ""
        trained = event["trained_parameters"]
        adapted = f", {count(trained)} trainable" if trained < event["parameters"] else ""
        processes = f"{event['world_size']} processes of " if event.get("world_size", 1) > 1 else ""
        self._print(
            f"{count(event['parameters'])} parameters{adapted}, {event['precision']}, "
            f"{processes}{counted(event['threads'], 'thread')}, "
            f"{'compiled' if event['compile'] == 'on' else 'not compiled'}{resumed}"
        )
        self._print(
            f"{_length(event)} of {event['tokens_per_step']:,} tokens "
            f"({batch_shape(event['micro_batch'], event)}), "
            f"{event['train_tokens']:,} training tokens; writing to {event['output_dir']}"
        )

    def _step(self, event: Event) -> None:
        self._total = event["total_steps"] or 0
        of = f"/{self._total}" if self._total else ""
        self._print(f"step {event['step']:>{len(str(self._total))}}{of}  {self._figures(event)}")

    def _figures(self, event: Event) -> str:
        eta = event["eta_seconds"]
        finish = datetime.now() + timedelta(seconds=eta)
        metrics = "".join(f"{name} {value}  " for name, value in current_metrics(event, self._settings))
        return (
            f"loss {event['loss']:.4f}  {metrics}{event['tokens_per_second']:,.0f} tokens/s  MFU {event['mfu']:.0%}  "
            f"{event['rss_bytes'] / 1e9:.1f} GB  {duration(eta)} left, done {clock(finish)}"
        )

    def _eval(self, event: Event) -> None:
        found = [metric for metric in metrics_in(event, self._settings) if metric.text]
        parts = []
        for metric in found:
            if not metric.within:
                details = ", ".join(inner.words(event) for inner in found if inner.within == metric.name)
                parts.append(metric.words(event) + (f" ({details})" if details else ""))
        place = "" if event["step"] is None else f" at step {event['step']}"  # a Hugging Face model has no steps
        self._print(f"validation{place}: {', '.join(parts)}", style="bold")
        if sample := event.get("sample"):
            # In a log every line is one event, so that tools that work on lines can read it.
            text = sample if self._console.is_terminal else printable_line(sample.replace("\n", "\\n"))
            self._print(f"sample: {text}", style="dim")

    def _end(self, event: Event) -> None:
        reasons = {"done": "done", "interrupted": "interrupted and saved", "out_of_time": "done at its time limit"}
        self._print(f"{reasons[event['reason']]} after step {event['step']:,} and {duration(event['seconds'])}")


def batch_shape(micro_batch: int, event: Event) -> str:
    """Describes the micro-batches of a step."""
    steps, window = event["gradient_accumulation_steps"], event["window"]
    processes = event.get("world_size", 1)
    full = micro_batch * steps * processes * window == event["tokens_per_step"]
    over = f" on each of {processes} processes" if processes > 1 else ""
    return f"{micro_batch} x {steps} {'windows of' if full else 'examples of up to'} {window}{over}"


class Warnings:
    """A sink for ranks other than 0 that prints only warnings."""

    def __init__(self, console: Console, rank: int) -> None:
        self._console, self._rank = console, rank

    def emit(self, event: Event) -> None:
        if event["event"] == "warning":
            self._console.print(Text(f"warning: rank {self._rank}: {event['message']}", style="yellow"), soft_wrap=True)

    def close(self) -> None:
        pass


class PreparationBar:
    """Shows the progress of reading and tokenizing: a bar in a terminal, otherwise one line per stage."""

    def __init__(self, console: Console, silent: bool = False) -> None:
        self._console, self._silent = console, silent
        self._stage, self._shown, self._started = "", 0.0, 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Implements `data.shards.Progress`: reports `done` of `total` bytes of a stage."""
        if self._silent:
            return
        if doing != self._stage:
            self._finish()
            self._stage, self._started = doing, time.monotonic()
            if self._console.is_terminal:
                columns = DESCRIPTION, BarColumn(), FIGURES
                self._bar = Progress(*columns, console=self._console, refresh_per_second=REDRAWS_PER_SECOND)
                self._task = self._bar.add_task(doing, total=total, figures="")
                self._bar.start()
            else:
                # Otherwise the total is unknown, or a count instead of a size.
                size = f" ({total / 1e6:.1f} MB)" if total > max(done, MIN_SHOWN_BYTES) else ""
                self._console.print(doing + size, highlight=False)
        elif time.monotonic() - self._shown < 1 / REDRAWS_PER_SECOND:
            return
        self._shown = time.monotonic()
        if self._bar is not None and self._task is not None:
            rate = done / max(self._shown - self._started, 1e-3)
            figures = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s"
            self._bar.update(self._task, completed=done, total=total, figures=figures)

    def show_message(self, doing: str) -> None:
        """Prints a line about the current activity."""
        self._finish()
        self._console.print(doing, highlight=False, style="dim")

    def emit(self, event: Event) -> None:
        """Ends the bar at the first event, which follows the preparation."""
        self._finish()

    def _finish(self) -> None:
        """Marks the current stage as complete."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=1, completed=1)
        self.close()

    def close(self) -> None:
        """Stops the bar at its current position."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _length(event: Event) -> str:
    if event["total_steps"]:
        return f"{event['total_steps']:,} steps"
    return f"steps until {event['until']}" if event["until"] else f"steps for {duration(event['max_hours'] * 3600)}"


def clock(when: datetime) -> str:
    """Formats a time of day, with the date if it is not today, or only the date if it is far off."""
    now = datetime.now()
    if when.date() == now.date():
        return when.strftime("%H:%M")
    return when.strftime("%a %d %b %H:%M" if (when - now).days < 300 else "%d %b %Y")


def duration(seconds: float) -> str:
    """Formats a duration, e.g. 2 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

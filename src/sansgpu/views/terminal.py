"""Prints training events and progress to a terminal."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from sansgpu.config import RunPaths, TaskSettings
from sansgpu.config.tasks import LOSS
from sansgpu.config.wording import count, counted, duration
from sansgpu.events.escape import encodable, printable, printable_line
from sansgpu.events.event import Event, current_metrics, data_messages, metric_texts
from sansgpu.events.jsonl import redirect_to_null
from sansgpu.tasks.configuration import DEFAULT_TASK, settings_of
from sansgpu.views.tables import percent

REDRAWS_PER_SECOND = 4
MIN_SHOWN_BYTES = 50_000
SHOWN_AFTER_SECONDS = 1.5  # a stage of unknown size is shown if it lasts longer
# A long stage prints another line after this share of its duration so far, within these limits.
REPEATED_AFTER_RATIO, REPEATED_AFTER_SECONDS, REPEATED_WITHIN_SECONDS = 0.1, 10.0, 30.0
DESCRIPTION = TextColumn("{task.description}", markup=False)  # columns of a progress bar
FIGURES = TextColumn("{task.fields[figures]}", markup=False)


class RunConsole(Console):
    """A console that prints untrusted text safely: without control characters, markup or emoji codes.

    Replaces the characters that the encoding of its file lacks.

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
            plain = segment.control or (segment.text.isascii() and segment.text.isprintable())
            yield segment if plain else segment._replace(text=encodable(printable(segment.text), self.encoding))

    def on_broken_pipe(self) -> None:
        self.quiet = True
        redirect_to_null(self.file)


class Terminal:
    """A sink that prints events as plain lines."""

    def __init__(self, console: Console, settings: TaskSettings | None = None, evaluated: str = "validation") -> None:
        """`settings` describe the task. Default: according to the start event. `evaluated` names the data."""
        self._console, self._settings = console, settings or settings_of(DEFAULT_TASK)
        self._total, self._evaluated = 0, evaluated
        self._folder: str | None = None  # the folder of the run, known from its start event on
        self._resumed_from: str | None = None

    def emit(self, event: Event) -> None:
        handlers: dict[str, Callable[[Event], None]] = {
            "start": self._start,
            "step": self._step,
            "eval": self._eval,
            "snapshot": self._snapshot,
            "warning": lambda e: self._print(f"warning: {e['message']}", style="yellow"),
            "end": self._end,
        }
        handlers[event["event"]](event)

    def close(self) -> None:
        pass

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _start(self, event: Event) -> None:
        self._settings = settings_of(event["task"])
        self._folder, self._resumed_from = event["output_dir"], event.get("resumed_from")
        resumed = f", resumed from {self._resumed_from}" if self._resumed_from else ""
        trained = event["trained_parameters"]
        adapted = f", {count(trained)} trainable" if trained < event["parameters"] else ""
        processes = f"{event['world_size']} processes of " if event.get("world_size", 1) > 1 else ""
        self._print(
            f"{count(event['parameters'])} parameters{adapted}, {event['precision']}, "
            f"{processes}{counted(event['threads'], 'thread')}, "
            f"{'compiled, ' if event['compile'] == 'on' else ''}{event['kernels']} kernels{resumed}"
        )
        self._print(
            f"{_length(event)} of {event['tokens_per_step']:,} tokens "
            f"({batch_shape(event['micro_batch'], event)}), "
            f"{event['optimizer']} at a learning rate of {event['learning_rate']:g}, "
            f"{counted(event['train_tokens'], 'training token')}; writing to {event['output_dir']}"
        )
        if _ends_before_time(event):
            self._print(f"{event['total_epochs']:.3g} epochs, which probably end before the time limit")
        for message in data_messages(event):
            self._print(message)

    def _snapshot(self, event: Event) -> None:
        """Prints a saved snapshot. A resumed run also reports the one that it was resumed from, for its record."""
        if event["path"] != self._resumed_from:
            self._print(f"snapshot {event['path']}")

    def _step(self, event: Event) -> None:
        self._total = event["total_steps"] or 0
        of = f"/{self._total}" if self._total else ""
        self._print(f"step {event['step']:>{len(str(self._total))}}{of}  {self._figures(event)}")

    def _figures(self, event: Event) -> str:
        eta = event["eta_seconds"]
        finish = datetime.now() + timedelta(seconds=eta)
        loss = f"loss {LOSS.shown(event['loss'])}  " if self._settings.main_metric == LOSS else ""
        metrics = "".join(f"{name} {value}  " for name, value in current_metrics(event, self._settings))
        speed = f"{event['tokens_per_second']:,.0f} tokens/s  {1 / event['step_seconds']:.3g} it/s"
        return (
            f"{loss}{metrics}{speed}  MFU {percent(event['mfu'])}  "
            f"{event['rss_bytes'] / 1e9:.1f} GB  {duration(eta)} left, done {clock(finish)}"
        )

    def _eval(self, event: Event) -> None:
        parts = metric_texts(event, self._settings)
        place = "" if event["step"] is None else f" at step {event['step']}"  # a Hugging Face model has no steps
        if (epoch := event.get("epoch") or 0) > 1:
            place += f" (epoch {epoch:.1f})"
        self._print(f"{self._evaluated}{place}: {', '.join(parts)}", style="bold")
        if sample := event.get("sample"):
            # In a log every line is one event, so that tools that work on lines can read it.
            text = sample if self._console.is_terminal else printable_line(sample.replace("\n", "\\n"))
            self._print(f"sample: {text}", style="dim")

    def _end(self, event: Event) -> None:
        reasons = {
            "done": "done",
            "interrupted": "interrupted and saved",
            "out_of_time": "done at its time limit",
            "early_stopping": "stopped early, because the validation loss no longer fell,",
        }
        next_step = ""
        if self._folder is not None and event["reason"] == "interrupted":
            next_step = f"; continue with: sansgpu train --resume --output-dir {shlex.quote(self._folder)}"
        elif self._folder is not None:
            final_step = event.get("final_step")
            of_best = "" if final_step in (None, event["step"]) else f" of step {final_step:,}, the best one,"
            next_step = f"; the model{of_best} is in {RunPaths(Path(self._folder)).final}"
        took = duration(event["seconds"])
        self._print(f"{reasons[event['reason']]} after step {event['step']:,} and {took}{next_step}")


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
    """Shows the progress of a command until it prints its next output.

    A stage with a known size gets a bar in a terminal, otherwise lines. All other stages are shown only if they last:
    with a spinner in a terminal, otherwise with lines at growing intervals.
    """

    def __init__(self, console: Console, silent: bool = False) -> None:
        self._console, self._silent = console, silent
        self.ends_at_start = False  # True if another display takes over at the start event of a run
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._watcher: threading.Thread | None = None
        self._stage: _Activity | None = None
        self._bar: Progress | None = None
        self._updated = 0.0

    def __call__(self, doing: str, done: int, total: int, unit: str = "byte", /) -> None:
        """Implements `events.progress.ReportProgress`."""
        if self._silent:
            return
        with self._lock:
            is_new = self._stage is None or self._stage.doing != doing
            if is_new:
                self._finish()
                self._stage = _Activity(doing)
                self._watch()
            assert self._stage is not None
            self._stage.done, self._stage.total, self._stage.unit = done, total, unit
            if not is_new and time.monotonic() - self._updated < 1 / REDRAWS_PER_SECOND:
                return
            self._updated = time.monotonic()
            if is_new and total and unit == "byte":
                self._show(self._stage)
            elif self._bar is not None:
                self._bar.update(
                    self._bar.task_ids[0], completed=done, total=total or None, figures=self._stage.figures
                )

    def show_message(self, doing: str) -> None:
        """Prints a line about the current activity."""
        with self._lock:
            self._finish()
            self._console.print(doing, highlight=False, style="dim")

    def emit(self, event: Event) -> None:
        """Ends the stage, because an event is printed."""
        with self._lock:
            self._finish()
            self._silent = self._silent or (event["event"] == "start" and self.ends_at_start)

    def close(self) -> None:
        """Ends the display. A bar stays at its current position."""
        self._closed.set()
        with self._lock:
            self._stop()

    def _watch(self) -> None:
        """Starts the thread that shows stages that last."""
        if self._watcher is None or self._closed.is_set():
            self._closed = threading.Event()
            self._watcher = threading.Thread(target=self._show_lasting, args=[self._closed], daemon=True)
            self._watcher.start()

    def _show_lasting(self, closed: threading.Event) -> None:
        while not closed.wait(1 / REDRAWS_PER_SECOND):
            with self._lock:
                if self._stage is not None and not closed.is_set() and self._stage.is_due():
                    self._show(self._stage)

    def _show(self, stage: _Activity) -> None:
        """Starts the bar or the spinner, or prints a line."""
        if not self._console.is_terminal:
            self._console.print(stage.line(), highlight=False, soft_wrap=True)
        elif self._bar is None:
            has_size = bool(stage.total) and stage.unit == "byte"
            spinner = SpinnerColumn("line" if self._console.options.ascii_only else "dots")
            columns = (BarColumn(),) if has_size else (spinner, TimeElapsedColumn())
            self._bar = Progress(
                DESCRIPTION, *columns, FIGURES, console=self._console, refresh_per_second=REDRAWS_PER_SECOND,
                transient=not has_size,
            )  # fmt: skip
            self._bar.add_task(stage.doing, total=stage.total or None, completed=stage.done, figures=stage.figures)
            self._bar.tasks[0].start_time = stage.started  # TimeElapsedColumn counts from here
            self._bar.start()
        stage.shown_at = time.monotonic()

    def _finish(self) -> None:
        """Marks the current stage as complete."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=1, completed=1)
        self._stop()

    def _stop(self) -> None:
        self._stage = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@dataclass
class _Activity:
    """An activity that a PreparationBar shows."""

    doing: str
    done: int = 0
    total: int = 0  # 0: unknown
    unit: str = "byte"
    started: float = field(default_factory=time.monotonic)
    shown_at: float | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def figures(self) -> str:
        """The amount done, with the speed if it is in bytes."""
        if self.unit != "byte":
            return f"{self.done:,} of {counted(self.total, self.unit)}" if self.total else counted(self.done, self.unit)
        if not self.total:
            return ""
        speed = self.done / max(self.seconds, 1e-3)
        return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {speed / 1e6:.1f} MB/s"

    def is_due(self) -> bool:
        """Returns whether the stage has lasted so long that it should be shown, or shown again."""
        if self.shown_at is None:
            return self.seconds >= SHOWN_AFTER_SECONDS
        shown = self.shown_at - self.started
        pause = min(REPEATED_WITHIN_SECONDS, max(REPEATED_AFTER_SECONDS, shown * REPEATED_AFTER_RATIO))
        return self.seconds >= shown + pause

    def line(self) -> str:
        if self.shown_at is None:
            if self.unit != "byte" or not self.total:
                return f"{self.doing} ..."
            # Otherwise the size is unknown.
            size = f" ({self.total / 1e6:.1f} MB)" if self.total > max(self.done, MIN_SHOWN_BYTES) else ""
            return self.doing + size
        return f"{self.doing} ... " + ", ".join(part for part in (self.figures, duration(self.seconds)) if part)


def _length(event: Event) -> str:
    total, expected = event["total_steps"], event.get("expected_steps")
    if total:
        if expected is None or expected >= total:
            return counted(total, "step")
        return f"about {expected:,} of {total:,} steps, as many as the time allows,"
    steps = f"about {counted(expected, 'step')}" if expected else "steps"
    return f"{steps} until {event['until']}" if event["until"] else f"{steps} for {duration(event['max_hours'] * 3600)}"


def _ends_before_time(event: Event) -> bool:
    """Returns whether the run will probably have read all its epochs before its time is over."""
    expected = event.get("expected_steps")
    return expected is not None and expected == event["total_steps"] and bool(event.get("total_epochs"))


def clock_of(moment: str) -> str:
    """Formats a time in ISO 8601 as `clock` does."""
    return clock(datetime.fromisoformat(moment))


def clock(when: datetime) -> str:
    """Formats a time of day, with the date if it is not today, or only the date if it is far off."""
    now = datetime.now()
    if when.date() == now.date():
        return when.strftime("%H:%M")
    return when.strftime("%a %d %b %H:%M" if (when - now).days < 300 else "%d %b %Y")

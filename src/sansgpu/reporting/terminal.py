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

from sansgpu.reporting.escape import printable
from sansgpu.reporting.events import Event
from sansgpu.reporting.jsonl import redirect_to_null

REDRAWS_PER_SECOND = 4
MIN_SHOWN_BYTES = 50_000
DESCRIPTION = TextColumn("{task.description}", markup=False)  # columns of a progress bar
FIGURES = TextColumn("{task.fields[figures]}", markup=False)
_ACCURACIES = {"mlm_acc": "tokens", "mnm_acc": "leaves"}  # masked token and leaf accuracy


class RunConsole(Console):
    """A console that prints untrusted text safely: without control characters, markup or emoji codes.

    If its reader exits, as `head` does, the run continues; rich's console would end the process.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
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

    def __init__(self, console: Console) -> None:
        self._console = console
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
        self._total = event["total_steps"] or 0
        resumed = f", resumed from {event['resumed_from']}" if event.get("resumed_from") else ""
        trained = event["trained_parameters"] / 1e6
        adapted = f", {trained:.1f}M trainable" if event["trained_parameters"] < event["parameters"] else ""
        processes = f"{event['world_size']} processes of " if event.get("world_size", 1) > 1 else ""
        self._print(
            f"{event['parameters'] / 1e6:.1f}M parameters{adapted}, {event['precision']}, "
            f"{processes}{event['threads']} threads, "
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
        self._print(f"step {event['step']:>{len(str(self._total))}}{of}  {_figures(event)}")

    def _eval(self, event: Event) -> None:
        known = {
            "loss": "loss {:.4f}", "perplexity": "perplexity {:.2f}", "bits_per_byte": "{:.4f} bits per byte",
            "exact_match": "exact match {:.2f} %", "f1": "F1 {:.2f} %", "questions": "{:.0f} questions",
            "answerable": "{:.0f} answerable", "unanswerable": "{:.0f} not",
        }  # fmt: skip
        parts = [_number(event, key, form) for key, form in known.items() if key in event]
        masked, used = _masked_metrics(event)
        others = [
            k for k in event if k not in known and k not in used and k not in ("event", "step", "sample", "seconds")
        ]
        parts += masked + [_number(event, key, key.replace("_", " ") + " {:.4f}") for key in others]
        place = "" if event["step"] is None else f" at step {event['step']}"  # a Hugging Face model has no steps
        self._print(f"validation{place}: {', '.join(parts)}", style="bold")
        if event.get("sample"):
            self._print(f"sample: {event['sample']}", style="dim")

    def _end(self, event: Event) -> None:
        reasons = {"done": "done", "interrupted": "interrupted and saved", "out_of_time": "done at its time limit"}
        self._print(f"{reasons[event['reason']]} after step {event['step']:,} and {duration(event['seconds'])}")


def _number(event: Event, key: str, form: str) -> str:
    return form.format(event[key]) if event[key] is not None else f"{key.replace('_', ' ')} not finite"


def batch_shape(micro_batch: int, event: Event) -> str:
    """Describes the micro-batches of a step."""
    count, window = event["gradient_accumulation_steps"], event["window"]
    processes = event.get("world_size", 1)
    full = micro_batch * count * processes * window == event["tokens_per_step"]
    over = f" on each of {processes} processes" if processes > 1 else ""
    return f"{micro_batch} x {count} {'windows of' if full else 'examples of up to'} {window}{over}"


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
                columns = (
                    DESCRIPTION,
                    BarColumn(),
                    FIGURES,
                )
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


def _figures(event: Event) -> str:
    eta = event["eta_seconds"]
    finish = datetime.now() + timedelta(seconds=eta)
    right = "".join(f"{what} {event[key]:.0%}  " for key, what in _ACCURACIES.items() if event.get(key) is not None)
    return (
        f"loss {event['loss']:.4f}  {right}{event['tokens_per_second']:,.0f} tokens/s  MFU {event['mfu']:.0%}  "
        f"{event['rss_bytes'] / 1e9:.1f} GB  {duration(eta)} left, done {clock(finish)}"
    )


def _masked_metrics(event: Event) -> tuple[list[str], set[str]]:
    """Describes the accuracy on masked tokens, and returns the keys that the description covers."""
    parts, used = [], set()
    for kind, what in (("mlm", "masked tokens"), ("mnm", "masked leaves"), ("tail", "whole tails")):
        count, share = event.get(f"{kind}_count"), event.get(f"{kind}_acc")
        if count is None or share is None:
            continue
        text = f"{share:.1%} of {count:,.0f} {what} correct"
        details = [_number(event, f"{kind}_loss", "loss {:.4f}")] if f"{kind}_loss" in event else []
        if f"{kind}_interval" in event:
            low, high = event[f"{kind}_interval"]
            details.append(f"95 % interval {low:.1%} to {high:.1%}")
        if f"{kind}_majority_acc" in event:
            details.append(f"majority baseline: {event[f'{kind}_majority_acc']:.1%}")
        parts.append(text + (f" ({', '.join(details)})" if details else ""))
        used |= {f"{kind}_{key}" for key in ("count", "hits", "acc", "loss", "interval", "majority_acc")}
    return parts, used


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

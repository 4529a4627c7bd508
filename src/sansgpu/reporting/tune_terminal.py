"""Prints a hyperparameter search: one line per trial above a progress bar, and finally a table."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID
from rich.table import Table
from rich.text import Text

from sansgpu.reporting.tables import grid
from sansgpu.reporting.terminal import DESCRIPTION, FIGURES, clock, duration

Result = dict[str, Any]

NAMES = {"loss": "loss", "bits_per_byte": "bits per byte"}


def value(chosen: object) -> str:
    """Formats a parameter's value with three significant digits."""
    return f"{chosen:.3g}" if isinstance(chosen, float) else "null" if chosen is None else str(chosen)


def state(row: Result) -> str:
    """Returns a trial's state, with the step if it was pruned."""
    if row["state"] == "pruned":
        return f"pruned at {row['step']}"
    return "baseline" if row["trial"] == 0 and row["state"] == "done" else str(row["state"])


def parameters(chosen: Result) -> str:
    """Formats the parameters of a trial by the last part of their keys. No parameters are the given configuration."""
    return ", ".join(f"{key.rpartition('.')[2]} {value(v)}" for key, v in chosen.items()) or "baseline"


def print_estimate(console: Console, about: Result) -> None:
    """Prints the search space and the estimated time."""
    table = grid()
    for key, values in about["space"].items():
        table.add_row(key, values)
    console.print(table)
    console.print(_length(about), soft_wrap=True, highlight=False)


def _length(about: Result) -> str:
    each, whole, trials = about["trial_seconds"], about["seconds"], about["trials"]
    text = f"{trials:,} trial{'s' if trials > 1 else ''}" if trials else "trials"
    if each is not None:
        text += f" of about {duration(each)}"
    if whole == 0:
        return text + ", all finished"
    if whole is None:
        return text + "; no time estimate, because the model does not fit into memory here"
    return f"{text}, about {duration(whole)} total (less with pruning), done {_finish(about)}"


def _finish(about: Result) -> str:
    return clock(datetime.fromisoformat(about["finish"]))


class TuneTerminal:
    """Prints the events of a search."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._running: dict[int, str] = {}  # progress of each running trial

    def __call__(self, event: Result) -> None:
        {
            "tune": self._tune,
            "trial_begin": self._trial_begin,
            "trial_step": self._trial_step,
            "trial_end": self._trial_end,
        }[event["event"]](event)

    def close(self) -> None:
        """Stops the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _tune(self, event: Result) -> None:
        print_estimate(self._console, event)
        if event["evaluations_changed"]:
            self._say(f"each trial is evaluated {event['evaluations']} times to allow pruning")
        if event["finished"]:
            of = f" of {event['trials']}" if event["trials"] else ""
            self._say(f"continuing {event['folder']}: {event['finished']}{of} trials done")
        else:
            self._say(f"writing to {event['folder']}; if you stop the search, the same command continues it")
        if self._console.is_terminal:
            columns = (
                DESCRIPTION,
                BarColumn(bar_width=20),
                FIGURES,
            )
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("trials", total=event["trials"], completed=event["finished"], figures="")
            self._bar.start()

    def _trial_begin(self, event: Result) -> None:
        self._running[event["trial"]] = "starting"
        if event["resumed"]:
            how = f"resumes from step {event['step']}" if event["step"] else "restarts"
            self._say(f"trial {event['trial']} {how}: {parameters(event['parameters'])}")
        self._redraw()

    def _trial_step(self, event: Result) -> None:
        of = f"/{event['total_steps']:,}" if event["total_steps"] else ""
        self._running[event["trial"]] = f"step {event['step']:,}{of} loss {event['loss']:.3f}"
        self._redraw()

    def _trial_end(self, event: Result) -> None:
        self._running.pop(event["trial"], None)
        loss = "" if event["loss"] is None else f"  {event['loss']:.4f}"
        parts = [f"trial {event['trial']:>3}  {event['state']:<7}{loss}", parameters(event["parameters"])]
        parts.append(duration(event["seconds"]))
        if event["best"]:
            parts.append(f"best {event['best']['loss']:.4f} (trial {event['best']['trial']})")
        if event["seconds_left"]:
            parts.append(f"{duration(event['seconds_left'])} left, done {_finish(event)}")
        styles = {"failed": "red", "pruned": "dim"}
        self._say("  ".join(parts), styles.get(event["state"], ""))
        if event["why"]:
            self._say(f"           {event['why']}", "red")
        self._redraw(event["finished"])

    def _redraw(self, finished: int | None = None) -> None:
        if self._bar is not None and self._task is not None:
            figures = "  ".join(f"trial {number}: {text}" for number, text in sorted(self._running.items()))
            self._bar.update(self._task, completed=finished, figures=figures)


def print_tune(console: Console, result: Result) -> None:
    """Prints the trials, best first, the gain, and the importance of the parameters."""
    bits = result["measure"] == "loss" and any(row["bits_per_byte"] is not None for row in result["trials"])
    keys = list(dict.fromkeys(key for row in result["trials"] for key in row["parameters"]))
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "", NAMES[result["measure"]], *(["bits per byte"] if bits else [])):
        table.add_column(name, justify="left" if not name else "right", no_wrap=not name)
    for name in (*(key.rpartition(".")[2].replace("_", " ") for key in keys), "minutes"):  # spaces let titles wrap
        table.add_column(name, justify="right")
    for row in result["trials"]:
        figures = [row["loss"], *([row["bits_per_byte"]] if bits else [])]
        chosen = [value(row["parameters"][key]) if key in row["parameters"] else "" for key in keys]
        table.add_row(
            str(row["trial"]),
            state(row),
            *("" if figure is None else f"{figure:.4f}" for figure in figures),
            *chosen,
            f"{row['seconds'] / 60:.1f}",
            style="bold" if row is result["best"] else {"failed": "red", "done": None}.get(row["state"], "dim"),
        )
    console.print(table)
    for row in result["trials"]:
        if row["why"]:
            console.print(Text(f"trial {row['trial']} failed: {row['why']}", "red"), soft_wrap=True)
    for sentence in sentences(result):
        console.print(sentence, soft_wrap=True, highlight=False)
    console.print(f"written: {', '.join(result['files'])}", soft_wrap=True, highlight=False)
    console.print(f"train it with: sansgpu train {result['files'][0]}", soft_wrap=True, highlight=False)


def sentences(result: Result) -> list[str]:
    """Describes the result of the search."""
    best, default, measure = result["best"], result["default"], NAMES[result["measure"]]
    found = []
    if best["trial"] == 0:
        found.append(f"the given configuration was the best: {measure} {best['loss']:.4f}")
    elif default is not None:
        found.append(
            f"trial {best['trial']} has {measure} {best['loss']:.4f}, {result['gain']:.2%} below the "
            f"{default['loss']:.4f} of the given configuration"
        )
    if result["importance"]:
        shares = [f"{key.rpartition('.')[2]} {share:.0%}" for key, share in result["importance"].items()]
        found.append(
            f"importance, as the share of differences between trials that a parameter explains: {', '.join(shares)}"
        )
    return found

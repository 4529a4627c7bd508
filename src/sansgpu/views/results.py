"""The results of a run as numbers and as text, for reports and model cards, and a table of many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sansgpu.config.tasks import LOSS, Metric
from sansgpu.config.wording import count, counted, duration, formatted
from sansgpu.events.event import Event, metrics_in
from sansgpu.files.folders import entries_below
from sansgpu.views.record import RunRecord
from sansgpu.views.tables import storage
from sansgpu.views.terminal import clock

NOT_FINITE = "not finite"  # shown for a number that is null in an event
STATES = {
    "done": "done",
    "out_of_time": "out of time",
    "interrupted": "interrupted",
    "early_stopping": "stopped early",
}


@dataclass(frozen=True)
class MainMetric:
    """The values of the task's main metric, which is the loss unless the task declares another one."""

    name: str
    training: float | None  # in the last step event
    validation: float | None  # in the last evaluation
    best: float | None  # in the evaluation with the lowest loss


@dataclass(frozen=True)
class RunSummary:
    """The results of a run. None: unknown."""

    name: str
    path: str
    task: str | None = None
    state: str = "broken"
    step: int | None = None
    total_steps: int | None = None
    final_step: int | None = None  # the step whose weights final/ has
    loss: float | None = None
    validation_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    main_metric: MainMetric | None = None
    bits_per_byte: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    joules: float | None = None
    parameters: int | None = None
    trained_parameters: int | None = None
    size_bytes: int | None = None
    changed: str | None = None  # time of the last change in UTC
    problem: str | None = None


def reported_metrics(record: RunRecord, event: Event) -> list[tuple[Metric, float]]:
    """Returns the task's metrics in an eval event that reports show, without the loss, with values in their units."""
    values = [(metric, metric.number(event[metric.name])) for metric in metrics_in(event, record.settings)]
    return [(metric, value) for metric, value in values if metric.reported and value is not None and metric != LOSS]


def summarize(record: RunRecord, held: bool = False) -> RunSummary:
    """Returns the results of a run. `held` is True if a process is training the run."""
    steps, best = record.steps, record.best
    last_evaluation = record.evaluations[-1] if record.evaluations else {}
    samples = [event.get("system") or {} for event in steps]
    peak = [e.get("rss_bytes") or 0 for e in (*steps, *samples)]
    return RunSummary(
        name=record.name,
        path=str(record.paths.root),
        task=record.config.get("task"),
        state=STATES.get(record.end_reason or "", "training" if held else "killed"),
        step=record.step,
        total_steps=record.total_steps,
        final_step=record.final_step,
        loss=steps[-1].get("loss") if steps else None,
        validation_loss=last_evaluation.get("loss"),
        best_loss=best["loss"] if best else None,
        best_step=best["step"] if best else None,
        main_metric=_main_metric(record),
        bits_per_byte=best.get("bits_per_byte") if best else None,
        tokens=steps[-1].get("tokens") if steps else None,
        tokens_per_second=_median(steps, "tokens_per_second"),
        mfu=_median(steps, "mfu"),
        seconds=record.seconds,
        peak_memory_bytes=max(peak, default=0) or None,
        joules=record.joules,
        parameters=record.start.get("parameters"),
        trained_parameters=record.start.get("trained_parameters"),
    )


def _main_metric(record: RunRecord) -> MainMetric:
    metric = record.settings.main_metric
    training, validation, best = (
        metric.number(event.get(metric.name))
        for event in ((record.steps or [{}])[-1], (record.evaluations or [{}])[-1], record.best or {})
    )
    return MainMetric(metric.label, training, validation, best)


def describe_results(found: RunSummary) -> Iterator[tuple[str, str]]:
    """Yields (name, text) for every known result of a run."""
    for name, format_text in _FORMATS.items():
        if (text := format_text(found)) is not None:
            yield name.format(metric=found.main_metric.name if found.main_metric else ""), text


def ran_on(record: RunRecord) -> str:
    """Describes the machine and how it was used."""
    known = {**record.start, **record.environment}
    cores, processes, threads = known.get("cores"), known.get("world_size") or 1, known.get("threads")
    found = [
        str(known.get("processor") or "unknown processor"),
        counted(cores, "core") if cores else "",
        f"{processes} processes" if processes > 1 else "",
        counted(threads, "thread") + (" each" if processes > 1 else "") if threads else "",
        str(known.get("precision") or ""),
        "compiled" if known.get("compile") == "on" else "",
        f"{known['kernels']} kernels" if known.get("kernels") else "",
    ]
    return ", ".join(part for part in found if part)


def changed_settings(record: RunRecord) -> datetime | None:
    """Returns the time of the last change of the run's files in UTC."""
    files = [file for file in (record.paths.metrics, record.paths.config) if file.is_file()]
    return datetime.fromtimestamp(max(f.stat().st_mtime for f in files), UTC) if files else None


def size_bytes(path: Path) -> int:
    """Returns the size of a file, or of all files below a folder."""
    files = entries_below(path) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def _median(steps: list[Event], key: str) -> float | None:
    values = [event[key] for event in steps if event.get(key) is not None]
    return median(values) if values else None


def _known(key: str, form: str, scale: float = 1.0) -> Callable[[RunSummary], str | None]:
    return lambda found: None if (value := getattr(found, key)) is None else form.format(value * scale)


def _steps(found: RunSummary) -> str | None:
    return (
        None if found.step is None else f"{found.step:,}" + (f" of {found.total_steps:,}" if found.total_steps else "")
    )


def _final(found: RunSummary) -> str | None:
    return None if found.final_step in (None, found.step) else f"of step {found.final_step:,}, the best snapshot"


def _best(found: RunSummary) -> str | None:
    best = _main("best")(found)
    return None if best is None else f"{best} at step {found.best_step:,}"


def _main(key: str) -> Callable[[RunSummary], str | None]:
    def words(found: RunSummary) -> str | None:
        value = getattr(found.main_metric, key, None)
        return None if value is None else formatted("{:.4f}", value)

    return words


def parameter_words(found: RunSummary) -> str | None:
    """Formats the number of parameters, and of trainable ones if there are fewer."""
    whole, trained = found.parameters, found.trained_parameters
    if whole is None:
        return None
    return count(whole) + (f", {count(trained)} trainable" if trained and trained < whole else "")


def energy_words(found: RunSummary) -> str | None:
    """Formats the energy of the processors, or returns None if it is unknown."""
    joules = found.joules
    return None if joules is None else f"{joules / 3.6e6:.3g} kWh" if joules > 3.6e5 else f"{joules / 3600:.3g} Wh"


_FORMATS: dict[str, Callable[[RunSummary], str | None]] = {
    "state": lambda found: str(found.state),
    "task": lambda found: str(found.task),
    "steps": _steps,
    "final model": _final,
    "validation {metric}, best": _best,
    "validation {metric}, last": _main("validation"),
    "training {metric}, last": _main("training"),
    "bits per byte, best": _known("bits_per_byte", "{:.4f}"),
    "parameters": parameter_words,
    "training tokens": lambda found: None if found.tokens is None else f"{found.tokens:,}",
    "tokens/s, median": _known("tokens_per_second", "{:,.0f}"),
    "MFU, median": _known("mfu", "{:.1f}%", 100),
    "time": lambda found: duration(found.seconds) if found.seconds else None,
    "memory, peak": lambda found: storage(found.peak_memory_bytes) if found.peak_memory_bytes else None,
    "processor energy": energy_words,
}


def evaluation_words(record: RunRecord, event: Event) -> list[tuple[str, str]]:
    """Returns (name, text) for the metrics of an evaluation, the main one first."""
    main = record.settings.main_metric
    value = event.get(main.name)
    return [(main.title, NOT_FINITE if value is None else main.shown(value))] + [
        (metric.title, f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
        for metric, value in reported_metrics(record, event)
        if metric != main
    ]


_COLORS = {"training": "green", "killed": "yellow", "interrupted": "yellow", "broken": "red"}


def _main_cell(metric: MainMetric, value: float | None) -> str:
    name = "" if metric.name == LOSS.label else f"{metric.name} "
    return "" if value is None else name + formatted("{:.3f}", value)


def _when(changed: str) -> str:
    return clock(datetime.fromisoformat(changed).astimezone().replace(tzinfo=None))


# Title, key, format, and priority: on narrow screens, columns with the highest number are dropped first.
_COLUMNS: list[tuple[str, str, Callable[[Any], str], int]] = [
    ("name", "name", str, 0),
    ("task", "task", str, 6),
    ("state", "state", str, 0),
    ("step", "step", "{:,}".format, 0),
    ("train", "main_metric", lambda metric: _main_cell(metric, metric.training), 3),
    ("val (best)", "main_metric", lambda metric: _main_cell(metric, metric.best), 0),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format, 4),
    ("params", "parameters", count, 5),
    ("time", "seconds", duration, 2),
    ("size", "size_bytes", storage, 7),
    ("changed", "changed", _when, 1),
]
_TEXT_COLUMNS = ("name", "task", "state")
MIN_NAME_WIDTH = 16  # characters


def print_runs(console: Console, rows: Sequence[RunSummary]) -> None:
    """Prints a table that fits the screen, then the problems of folders that cannot be read."""
    cells = {title: [_cell(row, key, format_value) for row in rows] for title, key, format_value, _ in _COLUMNS}
    widths = {title: max(map(len, (title, *column))) for title, column in cells.items()}
    widths["name"] = min(widths["name"], max(MIN_NAME_WIDTH, len("name")))
    shown = [title for title, *_ in _COLUMNS if title in _TEXT_COLUMNS or any(cells[title])]
    for title in sorted(shown, key=lambda title: -_priority(title)):
        if sum(widths[name] + 2 for name in shown) <= console.width or not _priority(title):
            break
        shown.remove(title)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in shown:
        right = title not in (*_TEXT_COLUMNS, "changed")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "name", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*(Text(cells[t][number], style=_COLORS.get(row.state, "")) if t == "state"
                        else Text(cells[t][number]) for t in shown))  # fmt: skip
    console.print(table)
    for row in rows:
        if row.problem:
            console.print(Text(f"{row.path}: {row.problem}", style="red"), soft_wrap=True)


def _cell(row: RunSummary, key: str, format_value: Callable[[Any], str]) -> str:
    if (value := getattr(row, key)) is None:
        return ""
    return format_value(value) + (f"/{row.total_steps:,}" if key == "step" and row.total_steps else "")


def _priority(title: str) -> int:
    return next(order for name, _, _, order in _COLUMNS if name == title)

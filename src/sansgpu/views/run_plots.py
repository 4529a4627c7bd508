"""Builds plots from the events of runs, and the confusion matrix of a run that classifies texts.

Each run has a color; in the plots of a single run, each series has one.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import escape

from sansgpu.config.tasks import LOSS, Metric
from sansgpu.events.event import Event
from sansgpu.views.page import PlotlyFigure
from sansgpu.views.plots import Plot, Series, Value, downsample
from sansgpu.views.record import RunRecord
from sansgpu.views.results import reported_metrics

STEP, TOKENS, MINUTES, HOURS = "step", "tokens", "elapsed time (minutes)", "elapsed time (hours)"
LONG_RUN_SECONDS = 2 * 3600.0  # runs longer than this show time in hours
MIN_HEIGHT, LABEL_HEIGHT = 220, 28  # pixels of a confusion matrix

Getter = Callable[[Event], float | None]


@dataclass(frozen=True)
class NamedRun:
    """A run with a name that is unique among the runs of a report."""

    label: str
    record: RunRecord


class Timeline:
    """Maps the steps of a run to tokens and elapsed time."""

    def __init__(self, record: RunRecord, long: bool) -> None:
        self._steps: list[int] = [0, *(event["step"] for event in record.steps)]
        self._axes: dict[str, list[float]] = {}
        time = (HOURS, "elapsed_seconds", 3600.0) if long else (MINUTES, "elapsed_seconds", 60.0)
        for axis, key, unit in ((TOKENS, "tokens", 1.0), time):
            found = [float(event[key]) / unit for event in record.steps if event.get(key) is not None]
            if found and len(found) == len(record.steps):
                self._axes[axis] = [0.0, *found]

    def along(self, steps: Sequence[int]) -> dict[str, list[float]]:
        """Returns tokens and elapsed time at each step, linearly interpolated between events."""
        return {axis: [self._at(step, values) for step in steps] for axis, values in self._axes.items()}

    def _at(self, step: int, values: list[float]) -> float:
        after = bisect_right(self._steps, step)
        if after >= len(self._steps):
            return values[-1]
        low, high = self._steps[after - 1], self._steps[after]
        return values[after - 1] + (values[after] - values[after - 1]) * (step - low) / (high - low)


class Drawing:
    """Builds the plots of runs on common axes."""

    def __init__(self, runs: Sequence[NamedRun]) -> None:
        self.runs = runs
        long = any(run.record.seconds > LONG_RUN_SECONDS for run in runs)
        self.axes = [STEP, TOKENS, HOURS if long else MINUTES]
        self._times = [Timeline(run.record, long) for run in runs]

    def curves(self) -> list[Plot]:
        steps: Callable[[str], Getter] = lambda key: lambda event: event.get(key)  # noqa: E731
        main = {run.record.settings.main_metric.name: run.record.settings.main_metric for run in self.runs}
        found = [
            *(self._metric(metric, wide=True) for metric in main.values()),
            self._plot("learning_rate", "Learning rate", "learning rate", [("", "step", steps("lr"))], from_zero=True),
            self._plot("gradient_norm", "Gradient norm, before clipping", "norm", [("", "step", steps("grad_norm"))]),
        ]
        more = (self._metric(metric) for metric in self._reported_metrics() if metric.name not in main)
        return [*_non_empty(found), *(plot for plot in _non_empty(more) if _is_informative(plot))]

    def _reported_metrics(self) -> list[Metric]:
        """Returns the tasks' metrics that have plots."""
        first = [(run.record, event) for run in self.runs for event in run.record.evaluations[:1]]
        found = (metric for record, event in first for metric, _ in reported_metrics(record, event))
        return list({metric.name: metric for metric in found if metric.plotted}.values())

    def _metric(self, metric: Metric, wide: bool = False) -> Plot:
        """Plots a metric in training, if recorded, and validation."""
        get: Getter = lambda event: metric.number(event.get(metric.name))  # noqa: E731
        roles = [("training", "step", get), ("validation", "eval", get)]
        note = "Higher is better." if metric.better == "higher" else ""
        unit = metric.unit or metric.label
        if metric == LOSS and any("perplexity" in event for run in self.runs for event in run.record.evaluations):
            unit = "loss (nats per token)"
        return self._plot(metric.name, metric.heading, unit, roles, note=note, wide=wide)

    def speed(self) -> list[Plot]:
        rate: Getter = lambda event: event.get("tokens_per_second")  # noqa: E731
        mfu: Getter = lambda event: 100 * event["mfu"] if event.get("mfu") is not None else None  # noqa: E731
        note = "Relative to the FLOP/s of a large matrix product on this machine."
        return _non_empty(
            [
                self._plot("speed", "Speed", "tokens/s", [("", "step", rate)], from_zero=True),
                self._plot("mfu", "MFU", "% of peak", [("", "step", mfu)], from_zero=True, note=note),
            ]
        )

    def resources(self) -> list[Plot]:
        found = [
            self._plot(name, title, unit, [(role, "step", get) for role, get in getters.items()], from_zero=zero)
            for name, title, unit, zero, getters in _RESOURCES
        ]
        return [*_non_empty(found), *self._cores()]

    def _cores(self) -> list[Plot]:
        series = []
        for number, run in enumerate(self.runs):
            rows = [row for event in run.record.steps if (row := (event.get("system") or {}).get("core_percent"))]
            same = [row for row in rows if len(row) == len(rows[0])]
            if same:
                means: list[Value] = [sum(column) / len(same) for column in zip(*same, strict=True)]
                names: list[Value] = [str(core) for core in range(len(means))]
                series.append(Series("", names, means, color=number, run=number, of=self._of(number)))
        title = "Mean load of each core"
        return [Plot("cores", title, "core", "% of the time", series, "bars", from_zero=True)] if series else []

    def breakdown(self) -> list[Plot]:
        parts = [time_parts(run.record) for run in self.runs]
        names = dict.fromkeys(name for found in sorted(parts, key=len, reverse=True) for name in found)
        long = any(run.record.seconds > LONG_RUN_SECONDS for run in self.runs)
        unit, size = ("hours", 3600.0) if long else ("minutes", 60.0)
        series = [
            Series(name, [found[name] / size], [run.label], color=place, run=number)
            for place, name in enumerate(names)
            for number, (run, found) in enumerate(zip(self.runs, parts, strict=True))
            if found.get(name)
        ]
        return [Plot("time", "Time by activity", unit, "", series, "rows", wide=True)] if series else []

    def _plot(
        self, name: str, title: str, y: str, roles: list[tuple[str, str, Getter]], from_zero: bool = False,
        note: str = "", wide: bool = False,
    ) -> Plot:  # fmt: skip
        series, cut = [], False
        roles_drawn: list[int] = []
        for number, run in enumerate(self.runs):
            for role, (what, event_name, get) in enumerate(roles):
                events = run.record.steps if event_name == "step" else run.record.evaluations
                values = [_finite(get(event)) for event in events]
                if not any(value is not None for value in values) or (from_zero and role and not any(values)):
                    continue
                kept = downsample(values)
                cut |= len(kept) < len(values)
                steps = [events[place]["step"] for place in kept]
                if role not in roles_drawn:
                    roles_drawn.append(role)
                series.append(
                    Series(
                        what,
                        steps,
                        [values[place] for place in kept],
                        color=number if len(self.runs) > 1 else role,
                        dash=roles_drawn.index(role) if len(self.runs) > 1 else 0,
                        marked=event_name == "eval" or len(steps) == 1,
                        run=number,
                        of=self._of(number),
                        along=self._times[number].along(steps),
                    )
                )
        if cut:
            note = f"{note} Downsampled: shows only the minimum and the maximum of neighboring steps.".strip()
        return Plot(name, title, STEP, y, series, note=note, from_zero=from_zero, wide=wide)

    def _of(self, number: int) -> str:
        return self.runs[number].label if len(self.runs) > 1 else ""


def time_parts(record: RunRecord) -> dict[str, float]:
    """Returns the seconds of a run by activity, which add up to its total time."""
    parts: dict[str, float] = {}
    before = 0
    for event in record.steps:
        steps, before = event["step"] - before, event["step"]
        phases: Mapping[str, float] = event.get("phase_seconds") or {"step": event.get("step_seconds") or 0.0}
        for phase, seconds in phases.items():
            name = "steps" if phase == "step" else f"steps: {phase}"
            parts[name] = parts.get(name, 0.0) + steps * seconds
    parts["evaluation"] = sum(event.get("seconds") or 0.0 for event in record.evaluations)
    parts["snapshots"] = sum(event.get("seconds") or 0.0 for event in record.events_named("snapshot"))
    first = record.steps[0] if record.steps else {}
    begun = [e for e in (*record.evaluations, *record.events_named("snapshot")) if e["step"] < first.get("step", 0)]
    taken = first.get("step", 0) * (first.get("step_seconds") or 0.0) + sum(e.get("seconds") or 0.0 for e in begun)
    start = max(0.0, (first.get("elapsed_seconds") or 0.0) - taken)
    rest = max(0.0, record.seconds - start - sum(parts.values()))
    return {key: seconds for key, seconds in {"start-up": start, **parts, "other": rest}.items() if seconds > 0}


def _system(key: str, scale: float = 1.0) -> Getter:
    def get(event: Event) -> float | None:
        value = (event.get("system") or {}).get(key)
        return None if value is None else scale * value

    return get


def _own_memory(event: Event) -> float | None:
    """Returns the peak in GB since the previous event."""
    found = [v for v in (event.get("rss_bytes"), _system("rss_bytes")(event)) if v is not None]
    return max(found) / 1e9 if found else None


def _used_memory(event: Event) -> float | None:
    limit, left = _system("memory_limit_bytes")(event), _system("memory_available_bytes")(event)
    return None if limit is None or left is None else max(0.0, limit - left) / 1e9


# Name, title, unit, True if the y axis starts at zero (then additional all-zero series are omitted), and series.
_RESOURCES: list[tuple[str, str, str, bool, dict[str, Getter]]] = [
    ("processor", "Processor, 100% per core", "%", True,
     {"this run": lambda event: _system("cpu_percent")(event) or event.get("cpu_percent"),
      "others": _system("other_percent"), "stolen by the host": _system("stolen_percent"),
      "throttled by the container's limit": _system("withheld_percent")}),
    ("memory", "Memory", "GB", True,
     {"this run": _own_memory, "all programs": _used_memory, "limit": _system("memory_limit_bytes", 1e-9),
      "swap": _system("swap_bytes", 1e-9)}),
    ("disk", "Disk I/O of this run", "MB/s", True,
     {"written": _system("disk_write_bytes_per_second", 1e-6), "read": _system("disk_read_bytes_per_second", 1e-6)}),
    ("disk_left", "Free disk space", "GB", True, {"": _system("disk_free_bytes", 1e-9)}),
    ("faults", "Page faults", "1/s", True,
     {"minor": _system("minor_faults_per_second"), "major (disk)": _system("major_faults_per_second")}),
    ("temperature", "Temperature of the processor", "°C", False, {"": _system("temperature_celsius")}),
    ("frequency", "Clock rate", "GHz", True, {"": _system("frequency_hz", 1e-9)}),
    ("power", "Power of the processors", "W", True, {"": _system("watts")}),
    ("throttled", "Thermal throttling", "times", True, {"": _system("throttled")}),
]  # fmt: skip


def _non_empty(plots: Sequence[Plot] | Iterator[Plot]) -> list[Plot]:
    """Drops plots without series, and plots of power or throttling that are always zero."""
    shown = []
    for plot in plots:
        all_zero = plot.name in ("throttled", "power") and not any(any(series.y) for series in plot.series)
        if plot.series and not all_zero:
            shown.append(plot)
    return shown


def _is_informative(plot: Plot) -> bool:
    """Returns True if a series changes or has a single value."""
    return any(len(set(series.y)) > 1 or len(series.y) == 1 for series in plot.series)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


@dataclass(frozen=True)
class Confusion:
    """`counts[i][j]` is the number of validation rows with label i for which label j was predicted."""

    step: int
    labels: list[str]
    counts: list[list[int]]

    @classmethod
    def of(cls, record: RunRecord) -> Confusion | None:
        """Returns the matrix of the last evaluation, or None if the run has none."""
        last = record.evaluations[-1] if record.evaluations else {}
        labels = record.section("data").get("labels")
        counts: Any = last.get("confusion")
        if not isinstance(labels, list) or not _is_square(counts, len(labels)):
            return None
        return cls(last["step"], [str(label) for label in labels], counts)

    def scores(self) -> list[tuple[str, list[str]]]:
        """Returns each label with its rows, precision, recall and F1 as text; "" if a score is undefined."""
        found = []
        for number, label in enumerate(self.labels):
            right, given = self.counts[number][number], sum(self.counts[number])
            predicted = sum(row[number] for row in self.counts)
            shares = ((right, predicted), (right, given), (2 * right, predicted + given))
            found.append((label, [f"{given:,}", *(f"{part / whole:.1%}" if whole else "" for part, whole in shares)]))
        return found

    def figure(self, number: int, of: str) -> PlotlyFigure:
        """Returns the matrix as a heat map. `number` is the index of the run and `of` its name if there are several."""
        names = [str(escape(label)) for label in self.labels]
        trace = {
            "type": "heatmap",
            "x": names,
            "y": names,
            "z": self.counts,
            "text": [[f"{count:,}" for count in row] for row in self.counts],
            "texttemplate": "%{text}",
            "colorscale": "Blues",
            "reversescale": False,
            "showscale": False,
            "hovertemplate": "label %{y}, predicted %{x}: %{z:,}<extra></extra>",
            "meta": {"run": number},
        }
        axis = {"type": "category", "automargin": True}
        layout = {
            "xaxis": {**axis, "title": {"text": "predicted label", "standoff": 8}},
            "yaxis": {**axis, "title": {"text": "label", "standoff": 8}, "autorange": "reversed"},
            "height": max(MIN_HEIGHT, LABEL_HEIGHT * (len(names) + 4)),
            "margin": {"l": 10, "r": 16, "t": 8, "b": 10},
        }
        title = f"Confusion matrix{f' of {of}' if of else ''}, validation rows at step {self.step:,}"
        text = json.dumps(
            {"data": [trace], "layout": layout}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
        return PlotlyFigure(f"confusion_{number}", title, text, wide=len(names) > 8)


def _is_square(counts: Any, size: int) -> bool:
    """Returns whether an event's value is a matrix of counts; metrics.jsonl may come from anybody."""
    rows: Sequence[Any] = counts if isinstance(counts, list) else []
    return len(rows) == size > 0 and all(
        isinstance(row, list) and len(row) == size and all(type(value) is int and value >= 0 for value in row)
        for row in rows
    )


def entity_scores(record: RunRecord) -> list[tuple[str, list[str]]]:
    """Returns each entity label in the last evaluation with its count, precision, recall and F1 as text."""
    by_label: Any = (record.evaluations[-1] if record.evaluations else {}).get("by_label")
    found = []
    for label, values in by_label.items() if isinstance(by_label, dict) else ():
        names = ("count", "precision", "recall", "f1")
        numbers: list[Any] = [values.get(name) if isinstance(values, dict) else None for name in names]
        if all(type(number) in (int, float) for number in numbers):
            found.append((str(label), [f"{numbers[0]:,.0f}", *(f"{number:.1%}" for number in numbers[1:])]))
    return found

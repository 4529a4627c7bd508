"""Training events and the sinks that receive them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from sansgpu.config import SansGPUError, TaskSettings
from sansgpu.config.tasks import LOSS, Metric

Event = dict[str, Any]  # `event` is start, step, eval, snapshot, warning or end

# Fields that differ between two otherwise identical runs.
MEASURED_KEYS = (
    "time", "tokens_per_second", "step_seconds", "it/s", "mfu", "gemm_flops_per_second", "rss_bytes", "cpu_percent",
    "eta_seconds", "seconds", "elapsed_seconds", "phase_seconds", "system", "expected_steps",
)  # fmt: skip
# Fields of an eval event that are not metrics.
EVALUATION_KEYS = ("event", "step", "epoch", "seconds", "sample", "time")
# Warnings with these causes depend on the machine's state, so two otherwise identical runs may differ in them.
MEASURED_CAUSES = ("memory", "swap", "data", "threads", "neighbour", "heat", "report", "callback")

NEAR_LIMIT = 0.08  # warn if a smaller fraction of memory is available


def finite(value: Any) -> Any:
    """Replaces infinite and NaN floats in nested values with None, because JSON does not support them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def metrics_in(event: Event, settings: TaskSettings) -> list[Metric]:
    """Returns the metrics in an eval event: the main one, others that the task declares, and all other numbers.

    The loss is among them only if it is the main metric.
    """
    declared = {metric.name: metric for metric in (settings.main_metric, *settings.metrics)}
    others = [Metric(key) for key in event if key not in (*declared, LOSS.name, *EVALUATION_KEYS)]
    return [metric for name, metric in declared.items() if name in event] + [
        metric for metric in others if event[metric.name] is None or metric.number(event[metric.name]) is not None
    ]


def metric_texts(event: Event, settings: TaskSettings) -> list[str]:
    """Formats the metrics in an eval event, each followed by its dependent metrics (`Metric.within`) in parentheses."""
    found = [metric for metric in metrics_in(event, settings) if metric.text]
    texts = []
    for metric in found:
        if not metric.within:
            details = ", ".join(inner.words(event) for inner in found if inner.within == metric.name)
            texts.append(metric.words(event) + (f" ({details})" if details else ""))
    return texts


def data_messages(start: Event) -> list[str]:
    """Returns the messages of a start event on how the data were cleaned and split."""
    return [*(start.get("cleaning") or ()), *filter(None, [start.get("split")])]


def current_metrics(event: Event, settings: TaskSettings) -> list[tuple[str, str]]:
    """Returns (short label, value) of the metrics in a step or eval event that step lines and the live view show."""
    shown = (metric for metric in settings.metrics if metric.short and event.get(metric.name) is not None)
    return [(metric.short, metric.shown(event[metric.name])) for metric in shown]


def now() -> str:
    """Returns the current time as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RecordError(SansGPUError):
    """metrics.jsonl cannot be written. The run ends and repeats the steps since its last snapshot when resumed."""


class Sink(Protocol):
    """Receives the events of a run."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None:
        """Releases resources. No event follows."""


class EventBuffer:
    """A sink that stores events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def disabled_warning(name: str, error: BaseException) -> Event:
    """Returns the warning about a sink that raised an exception."""
    why = " ".join(str(error).split()) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
    message = f"{name} failed and was disabled ({why}); training continues."
    return {"event": "warning", "cause": "callback", "message": message}


class Sinks:
    """Broadcasts events to sinks. A sink that fails is removed with a warning, except if it raises RecordError."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._buffer: list[Event] | None = None

    def add(self, *sinks: Sink) -> None:
        """Adds sinks, which receive later events only."""
        self._sinks += sinks

    def add_made(self, name: str, make: Callable[[], Sink]) -> None:
        """Makes and adds a sink, or emits a warning if that fails."""
        try:
            self.add(make())
        except Exception as error:  # a sink must not stop training
            self.emit(disabled_warning(name, error))

    def hold(self) -> None:
        """Buffers events until `release`."""
        self._buffer = [] if self._buffer is None else self._buffer

    def release(self, *first: Event) -> None:
        """Emits `first`, then the buffered events."""
        buffered, self._buffer = self._buffer or [], None
        for event in (*first, *buffered):
            self.emit(event)

    def emit(self, event: Event) -> None:
        if self._buffer is not None:
            self._buffer.append(event)
            return
        failed: list[Event] = []
        for sink in list(self._sinks):
            try:
                sink.emit(event)
            except RecordError:
                raise
            except (Exception, SystemExit) as error:  # a sink must not stop training
                self._sinks.remove(sink)
                failed.append(disabled_warning(getattr(sink, "name", type(sink).__name__), error))
        for warning in failed:
            self.emit(warning)

    def warn(self, message: str, cause: str | None = None) -> None:
        self.emit({"event": "warning", "message": message, **({"cause": cause} if cause else {})})

    def close(self) -> None:
        self.release()
        for sink in self._sinks:
            with contextlib.suppress(Exception):
                sink.close()

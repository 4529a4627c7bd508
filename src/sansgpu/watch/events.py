"""Events, and the sinks they go to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Protocol

from sansgpu.config import SansGPUError

Event = dict[str, Any]  # `event` is start, step, eval, snapshot, warning or end

# What differs between two runs of the same thing; everything else in an event does not.
MEASURED_KEYS = (
    "time", "tokens_per_second", "step_seconds", "mfu", "gemm_flops_per_second", "rss_bytes", "cpu_percent",
    "eta_seconds", "seconds", "elapsed_seconds", "phase_seconds", "system",
)  # fmt: skip
# Warnings with these causes are of the machine's state: of two equal runs one may hear them and the other not.
MEASURED_CAUSES = ("memory", "swap", "data", "threads", "neighbour", "heat")

NEAR_LIMIT = 0.08  # of memory that is left, below which people are to hear of it


def finite(value: Any) -> Any:
    """`value` with None for every float in it that is infinite or not a number: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def now() -> str:
    """The time of day as an event's `time`: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class RecordError(SansGPUError):
    """The run's record cannot be written, so the run ends: what it did since the last snapshot is done again."""


class Sink(Protocol):
    """Takes events."""

    def emit(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """No event follows."""


class Kept:
    """Keeps events for those who come later."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Take one event."""
        self.events.append(event)

    def close(self) -> None:
        """Nothing to close."""


class Sinks:
    """Hands every event to every sink. One that fails is dropped with a warning to the others, but for the record."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._held: list[Event] | None = None

    def hold(self) -> None:
        """Keep the events that come until `release`."""
        self._held = [] if self._held is None else self._held

    def release(self, *first: Event) -> None:
        """Hand on `first`, and then what was held."""
        held, self._held = self._held or [], None
        for event in (*first, *held):
            self.emit(event)

    def emit(self, event: Event) -> None:
        """Take one event."""
        if self._held is not None:
            self._held.append(event)
            return
        failed: list[Event] = []
        for sink in list(self._sinks):
            try:
                sink.emit(event)
            except RecordError:
                raise
            except Exception as error:  # whatever a sink does wrong, training goes on
                self._sinks.remove(sink)
                name, why = getattr(sink, "name", type(sink).__name__), " ".join(str(error).split())
                failed.append({"event": "warning", "message": f"{name} stopped: {why}; training goes on."})
        for warning in failed:
            self.emit(warning)

    def warn(self, message: str) -> None:
        """Emit a warning."""
        self.emit({"event": "warning", "message": message})

    def close(self) -> None:
        """Close every sink."""
        self.release()
        for sink in self._sinks:
            with contextlib.suppress(Exception):
                sink.close()

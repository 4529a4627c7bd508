"""User callbacks that are called during training."""

from __future__ import annotations

from collections.abc import Callable

from sansgpu.events.controls import Controls
from sansgpu.events.event import Event


class Callback:
    """Base class of callbacks; override the methods that you need.

    `event` has the fields of a line in metrics.jsonl. `run.stop()`, `run.save()`, `run.evaluate()` and `run.pause()`
    take effect after the current step. `on_step` is called every training.logging_steps steps, with a short delay while
    a snapshot is written. A callback that raises an exception is disabled with a warning.
    """

    def on_step(self, event: Event, run: Controls) -> None:
        """`event` has loss, lr, grad_norm, tokens_per_second etc., averaged since the last call."""

    def on_eval(self, event: Event, run: Controls) -> None:
        """`event` has the validation loss and the task's own metrics."""

    def on_snapshot(self, event: Event, run: Controls) -> None:
        """`event["path"]` is the name of a snapshot that was completely written."""

    def on_end(self, event: Event, run: Controls) -> None:
        """`event["reason"]` is done, interrupted or out_of_time."""


class CallbackSink:
    """A sink that passes events to one callback."""

    def __init__(self, callback: Callback, controls: Controls) -> None:
        self._callback, self._controls = callback, controls
        self.name = type(callback).__name__  # named in the warning if the callback fails

    def emit(self, event: Event) -> None:
        methods: dict[str, Callable[[Event, Controls], None]] = {
            "step": self._callback.on_step,
            "eval": self._callback.on_eval,
            "snapshot": self._callback.on_snapshot,
            "end": self._callback.on_end,
        }
        if (method := methods.get(event["event"])) is not None:
            method(event, self._controls)

    def close(self) -> None:
        pass

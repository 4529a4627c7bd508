"""A program's own code, called as a run goes on."""

from __future__ import annotations

from collections.abc import Callable

from sansgpu.watch.controls import Controls
from sansgpu.watch.events import Event


class Callback:
    """What to do on the way; override what is needed.

    `event` is a line of metrics.jsonl, and `run` takes wishes: `run.stop()`, `run.save()`, `run.evaluate()`,
    `run.pause()` are heeded after the step that is under way. Steps are told as often as training.logging_steps says,
    and while a snapshot is being written a little later. One that raises is left out from then on, and the run says so.
    """

    def on_step(self, event: Event, run: Controls) -> None:
        """`event` has loss, lr, grad_norm, tokens_per_second and so on, means since the last one."""

    def on_eval(self, event: Event, run: Controls) -> None:
        """`event` has the validation loss and the task's own metrics."""

    def on_snapshot(self, event: Event, run: Controls) -> None:
        """`event["path"]` is the name of the snapshot, which is whole on the disk."""

    def on_end(self, event: Event, run: Controls) -> None:
        """`event["reason"]` is done, interrupted or out_of_time."""


class Callbacks:
    """A sink that hands events to one callback."""

    def __init__(self, callback: Callback, controls: Controls) -> None:
        self._callback, self._controls = callback, controls
        self.name = type(callback).__name__  # for people, where it fails

    def emit(self, event: Event) -> None:
        """Call the method of this kind of event."""
        methods: dict[str, Callable[[Event, Controls], None]] = {
            "step": self._callback.on_step,
            "eval": self._callback.on_eval,
            "snapshot": self._callback.on_snapshot,
            "end": self._callback.on_end,
        }
        if (method := methods.get(event["event"])) is not None:
            method(event, self._controls)

    def close(self) -> None:
        """Nothing is held."""

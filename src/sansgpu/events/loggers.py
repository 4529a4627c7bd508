"""Sinks that pass events on: to TensorBoard and to a user's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from sansgpu.config.errors import how_to_install, is_installed, require
from sansgpu.events.controls import Controls
from sansgpu.events.event import Event


def require_boards(names: Sequence[str], warn: Callable[[str], None]) -> None:
    """Raises ConfigError if a requested logger is not installed; without TensorBoard, the default, it only warns."""
    for name in names:
        if name != "tensorboard":
            require(f"training.report_to {name}", name)
        elif not is_installed(name):
            warn(f"no TensorBoard logs are written: {how_to_install('writing them', name)}")


def scalars(event: Event) -> dict[str, float]:
    """Returns the numbers of a step or eval event by the names that loggers show, e.g. `train/loss`."""
    group = {"step": "train", "eval": "validation"}.get(event["event"])
    if group is None:
        return {}
    named = [(group, event), ("system", event.get("system") or {}), ("phase_seconds", event.get("phase_seconds") or {})]
    return {
        f"{group}/{key}": value
        for group, values in named
        for key, value in values.items()
        if isinstance(value, (int, float)) and key != "step"
    }


class TensorBoard:
    """A sink that writes the scalars of step and eval events, and samples as text, to TensorBoard."""

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported here because it is slow

        purge = None if resumed_step is None else resumed_step + 1  # drop what a killed run wrote after its snapshot
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def emit(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"])
        if event.get("sample"):
            self._writer.add_text("sample", event["sample"], event["step"])

    def close(self) -> None:
        self._writer.close()


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
        """`event["reason"]` is done, interrupted, out_of_time or early_stopping."""


class CallbackSink:
    """A sink that passes events to one callback."""

    def __init__(
        self, callback: Callback, controls: Controls, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`around` is entered for each call of the callback."""
        self._callback, self._controls, self._around = callback, controls, around
        self.name = type(callback).__name__  # named in the warning if the callback fails

    def emit(self, event: Event) -> None:
        methods: dict[str, Callable[[Event, Controls], None]] = {
            "step": self._callback.on_step,
            "eval": self._callback.on_eval,
            "snapshot": self._callback.on_snapshot,
            "end": self._callback.on_end,
        }
        if (method := methods.get(event["event"])) is not None:
            with self._around():
                method(event, self._controls)

    def close(self) -> None:
        pass

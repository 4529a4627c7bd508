"""The log of a run with the names of transformers' `trainer.state.log_history`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sansgpu.events.event import EVALUATION_KEYS, Event

Entry = dict[str, Any]


class LogHistory:
    """A sink that keeps an entry for each step, eval and end event in `log_history`.

    As in transformers, a step's entry has loss, learning_rate and grad_norm, that of an evaluation eval_loss and the
    other metrics with the prefix eval_, and the last entry the run's mean train_loss and its speed. Entries of steps
    also have train_loss, train_samples_per_second and train_steps_per_second, since the last entry of a step.
    """

    def __init__(self, examples_per_step: int, events: Iterable[Event] = ()) -> None:
        self.log_history: list[Entry] = []
        self._examples_per_step = examples_per_step
        for event in events:
            self.emit(event)

    @property
    def global_step(self) -> int:
        """The last step that was logged."""
        return max((entry["step"] for entry in self.log_history), default=0)

    def emit(self, event: Event) -> None:
        make = {"step": self._of_step, "eval": self._of_evaluation, "end": self._of_end}.get(event["event"])
        if make is not None:
            self.log_history.append(make(event))

    def close(self) -> None:
        pass

    def _speed(self, steps_per_second: float) -> Entry:
        return {
            "train_samples_per_second": steps_per_second * self._examples_per_step,
            "train_steps_per_second": steps_per_second,
        }

    def _of_step(self, event: Event) -> Entry:
        return {
            "step": event["step"],
            "loss": event["loss"],
            "train_loss": event["loss"],
            "learning_rate": event.get("lr"),
            "grad_norm": event.get("grad_norm"),
            **self._speed(1 / event["step_seconds"] if event.get("step_seconds") else 0.0),
        }

    def _of_evaluation(self, event: Event) -> Entry:
        metrics = {f"eval_{key}": value for key, value in event.items() if key not in EVALUATION_KEYS}
        return {"step": event["step"], "epoch": event.get("epoch"), **metrics, "eval_runtime": event.get("seconds")}

    def _of_end(self, event: Event) -> Entry:
        steps = [entry for entry in self.log_history if "train_loss" in entry]
        seconds = event.get("seconds") or 0.0
        before, weighted = 0, 0.0  # each loss is the mean over the steps since the entry before it
        for entry in steps:
            before, weighted = entry["step"], weighted + (entry["loss"] or 0.0) * (entry["step"] - before)
        return {
            "step": event["step"],
            "train_loss": weighted / before if before else None,
            "learning_rate": steps[-1]["learning_rate"] if steps else None,
            "train_runtime": seconds,
            **self._speed(event["step"] / seconds if seconds else 0.0),
        }

"""Compute threads that give way to other programs."""

from __future__ import annotations

import torch

from sansgpu.config import TrainingConfig
from sansgpu.machine.probe import Environment, resolve_threads
from sansgpu.watch.events import Event

AGREEING_EVENTS = 2  # step events in a row that ask for another number of threads: one may be an accident


class AdaptiveThreads:
    """Changes torch's threads with `training.adapt_threads`, so that no thread waits for a core that another program
    uses; without it the threads stay as they are.
    """

    def __init__(self, training: TrainingConfig, environment: Environment) -> None:
        self._enabled = training.adapt_threads
        self._now = environment.threads
        self._most = max(environment.threads, resolve_threads(training))
        self._asked: list[int] = []  # by the last step events

    def see(self, event: Event) -> tuple[int, str] | None:
        """Returns the new number of threads and a sentence about the change, if a step event gives reason for one."""
        system = event["system"] or {}
        others = ((system.get("other_percent") or 0.0) + (system.get("stolen_percent") or 0.0)) / 100
        self._asked = [*self._asked, max(1, self._most - round(others))][-AGREEING_EVENTS:]
        wanted = self._asked[-1]
        if not self._enabled or wanted == self._now or self._asked != [wanted] * AGREEING_EVENTS:
            return None
        before, self._now = self._now, wanted
        torch.set_num_threads(wanted)
        return wanted, (
            f"other programs use {others:.1f} cores: the run goes on with {wanted} threads instead of {before}, which "
            "changes its last bits."
        )

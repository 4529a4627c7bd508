"""Adapts the number of compute threads to the load of other programs."""

from __future__ import annotations

import torch

from sansgpu.config import TrainingConfig
from sansgpu.events.event import Event
from sansgpu.machine.probe import Environment, resolve_threads

AGREEING_EVENTS = 2  # consecutive step events that must call for the same change, since one may be an accident


class AdaptiveThreads:
    """Adapts torch's number of threads to the free cores if `training.adapt_threads` is set."""

    def __init__(self, training: TrainingConfig, environment: Environment) -> None:
        self._enabled = training.adapt_threads
        self.count = environment.threads  # compute threads now
        self._max_threads = max(environment.threads, resolve_threads(training))
        self._suggested: list[int] = []  # numbers of threads that suit the last step events

    def observe(self, event: Event) -> str | None:
        """Sets the number of threads that suits the last events; returns a message if it changed, otherwise None."""
        system = event["system"] or {}
        others = ((system.get("other_percent") or 0.0) + (system.get("stolen_percent") or 0.0)) / 100
        self._suggested = [*self._suggested, max(1, self._max_threads - round(others))][-AGREEING_EVENTS:]
        suggested = self._suggested[-1]
        if not self._enabled or suggested == self.count or self._suggested != [suggested] * AGREEING_EVENTS:
            return None
        before, self.count = self.count, suggested
        torch.set_num_threads(suggested)
        return (
            f"other programs use {others:.1f} cores: training.threads is now {suggested} instead of {before}; results "
            "are no longer bit-identical to those of an undisturbed run."
        )

"""Trains the trials of a search in parallel workers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from sansgpu.config import Config, ConfigError, SansGPUError
from sansgpu.jobs.tune.study import ClaimedTrial, Study
from sansgpu.jobs.tune.trial import Length, Outcome, TrialRun, trial_config
from sansgpu.machine.interrupt import Interrupt
from sansgpu.machine.world import grace_seconds
from sansgpu.planning.forecast import done_at
from sansgpu.views.tune_events import SearchEstimate, SearchEvent, TrialBegin, TrialEnd, TrialStep

MAX_IDENTICAL_FAILURES = 3  # a search that starts with this many equal failures stops
POLL_SECONDS = 0.2  # interval of checks for a signal

Show = Callable[[SearchEvent], None]


@dataclass(frozen=True)
class SearchBudget:
    """Limits of a search. The time runs from construction."""

    space: dict[str, str]  # used in the estimate only
    trials: int | None
    hours: float | None
    workers: int
    began: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        return time.monotonic() - self.began

    def seconds_left(self, spent: float) -> float | None:
        return None if self.hours is None else max(0.0, self.hours * 3600 - spent)

    def has_time_for(self, seconds: float | None) -> bool:
        """Returns True if a trial of this duration, or of an unknown one, would end in time."""
        left = self.seconds_left(self.spent())
        return left is None or seconds is None or seconds <= left

    def estimate(self, trial_seconds: float | None, done: int, spent: float = 0.0) -> SearchEstimate:
        """Estimates the remaining time after `spent` seconds, assuming that no trial is pruned."""
        limits = [left for left in [self.seconds_left(spent)] if left is not None]
        if self.trials is not None and trial_seconds is not None:
            limits.append(-(-max(0, self.trials - done) // self.workers) * trial_seconds)
        seconds = min(limits, default=None)
        finish = None if seconds is None else done_at(seconds)
        return SearchEstimate(self.space, self.trials, trial_seconds, seconds, finish)


class Search:
    """Workers that train trials until the budget is spent, a signal arrives, or the first trials all fail alike."""

    def __init__(
        self, study: Study, config: Config, length: Length, measure: str, budget: SearchBudget, show: Show
    ) -> None:
        self._study, self._config, self._length = study, config, length
        self._measure, self._budget, self._show = measure, budget, show
        self._lock = threading.Lock()  # guards events, _running and _stopped
        self._running: list[TrialRun] = []
        self._stopped = False

    def run(self) -> int | None:
        """Returns the signal that stopped the search, if any. Raises SansGPUError if all first trials fail alike."""
        with Interrupt(grace_seconds()) as interrupt, ThreadPoolExecutor(self._budget.workers) as pool:
            pending: Sequence[Future[None]] = [pool.submit(self._work) for _ in range(self._budget.workers)]
            try:
                while pending:
                    done, rest = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    pending = list(rest)
                    if interrupt.signal is not None or self._budget.seconds_left(self._budget.spent()) == 0:
                        self._stop()
            finally:
                self._stop()  # also ends the other workers if one failed
            return interrupt.signal

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for run in self._running:
                run.stop("stopped")

    def _work(self) -> None:
        study = self._study
        while not self._stopped and self._budget.has_time_for(study.trial_seconds()):
            if (claimed := study.claim(self._budget.trials)) is None:
                return
            outcome = self._train(claimed)
            study.finish(claimed, outcome, self._measure)
            self._emit(self._end_of(claimed, outcome))
            if outcome.state == "failed":
                _raise_if_all_fail(study)

    def _end_of(self, claimed: ClaimedTrial, outcome: Outcome) -> TrialEnd:
        best, done = self._study.best(), self._study.finished()
        return TrialEnd(
            trial=claimed.number,
            state=outcome.state,
            loss=outcome.measured.get(self._measure),
            parameters=claimed.values,
            seconds=outcome.seconds,
            why=outcome.why,
            best=None if best is None or best.value is None else (best.number, best.value),
            finished=done,
            left=self._budget.estimate(self._study.trial_seconds(), done, self._budget.spent()),
        )

    def _train(self, claimed: ClaimedTrial) -> Outcome:
        try:
            config = trial_config(self._config, claimed.values, self._length)
        except ConfigError as error:
            return Outcome("failed", {}, 0.0, str(error).removeprefix("the configuration: "))
        run = TrialRun(self._study.run_folder(claimed.number), config)
        with self._lock:
            if self._stopped:
                return Outcome("stopped", {}, 0.0)
            self._running.append(run)
        self._emit(TrialBegin(claimed.number, claimed.values, claimed.resumed, run.step()))
        total = 0

        def on_event(event: dict[str, Any]) -> None:
            nonlocal total
            total = event.get("total_steps") or total
            if event["event"] == "eval":
                self._report(claimed, run, event, total)
            elif event["event"] == "step":
                self._emit(TrialStep(claimed.number, event["step"], event["total_steps"], event["loss"]))

        try:
            return run.train(claimed.resumed, on_event)
        finally:
            with self._lock:
                self._running.remove(run)

    def _report(self, claimed: ClaimedTrial, run: TrialRun, event: dict[str, Any], steps: int) -> None:
        loss = event[self._measure]
        if loss is not None and self._study.report(claimed, event["step"] / max(1, steps), loss):
            run.stop("pruned")

    def _emit(self, event: SearchEvent) -> None:
        with self._lock:
            self._show(event)


def _raise_if_all_fail(study: Study) -> None:
    """Raises SansGPUError if the first trials all failed with the same message, apart from numbers."""
    first = study.trials()[:MAX_IDENTICAL_FAILURES]
    whys = [trial.user_attrs.get("why") for trial in first]
    alike = {re.sub(r"-?(\d[\d.,e+-]*|nan|inf)", "#", why) for why in whys if why}
    if len(first) == MAX_IDENTICAL_FAILURES and all(whys) and len(alike) == 1:
        raise SansGPUError(f"the first {MAX_IDENTICAL_FAILURES} trials have all failed: {whys[-1]}")

"""The trials of a search: claimed from an Optuna study in SQLite, and trained in parallel workers.

Several processes may share a study.
"""

from __future__ import annotations

import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import OptunaError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from sansgpu.config import ConfigError, RunPaths, SansGPUError, derive_seed, flatten
from sansgpu.config.schema import Config
from sansgpu.config.search_space import SearchParameter, Space, spaced_values
from sansgpu.config.wording import first_line
from sansgpu.files.ownership import OutputFolder, lock_run
from sansgpu.jobs.tune.trial import Length, Outcome, TrialRun, trial_config
from sansgpu.machine.distributed.world import grace_seconds
from sansgpu.machine.interrupt import Interrupt
from sansgpu.planning.forecast import done_at
from sansgpu.train.snapshots import delete_snapshots
from sansgpu.views.tune import SearchEstimate, SearchEvent, TrialBegin, TrialEnd, TrialStep

NAME = "tune"
# Attribute of trial 0 in the database: the keys of the unchanged configuration whose values are inside the space
UNCHANGED_CONFIG = "as_it_is"
STARTUP_TRIALS = 5  # trials before the sampler has data: the unchanged configuration, and points spread over the space
PRUNER_STARTUP_TRIALS, PRUNER_WARMUP_PERCENT = 3, 30  # finished trials and progress of a trial before it may be pruned
LOCK_SECONDS = 600  # how long to wait while another worker plans
SHUTDOWN_SECONDS = 10  # time that a run has to end after its search was killed
STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
MAX_IDENTICAL_FAILURES = 3  # stop the search if its first trials, this many, all fail alike
POLL_SECONDS = 0.2  # interval of checks for a signal

Values = dict[str, Any]
Show = Callable[[SearchEvent], None]


@dataclass(frozen=True)
class ClaimedTrial:
    """A trial that this worker has locked."""

    number: int
    values: Values  # empty in trial 0, the unchanged configuration
    resumed: bool
    trial: optuna.Trial
    lock: FileLock


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raises ConfigError if the search's database is damaged or was changed by another program."""
    try:
        yield
    except (OptunaError, SQLAlchemyError, RuntimeError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{folder / 'study.db'} cannot be read: {first_line(error)}; restore it from a copy, or start a new search "
            "in another --output-dir."
        ) from None


class Study:
    """A new or existing search in `folder`, with its trials/ and study.db."""

    def __init__(self, folder: Path, space: Space, pruner: str, seed: int, length: Length) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.folder, self._space, self._seed, self._length = folder, space, seed, length
        self._pruner = pruners()[pruner]
        url = f"sqlite:///{folder.absolute() / 'study.db'}"
        with readable(folder):
            self._storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}})
            self.optuna_study = optuna.create_study(storage=self._storage, study_name=NAME, load_if_exists=True)
            self.trials()

    def begin(self, default: Values) -> None:
        """Enqueues the startup trials that are missing. Trial 0 is the unchanged configuration; the sampler uses only
        its values that lie inside the space.
        """
        inside = {key: value for key, value in default.items() if self._space[key].contains(value)}
        for number in range(len(self.trials()), STARTUP_TRIALS):
            if number:
                self.optuna_study.enqueue_trial(spaced_values(self._space, number))
            else:
                self.optuna_study.enqueue_trial(inside, user_attrs={UNCHANGED_CONFIG: list(inside)})

    def trials(self) -> list[FrozenTrial]:
        return list(self.optuna_study.get_trials(deepcopy=False))

    def finished(self) -> int:
        return sum(trial.state.is_finished() for trial in self.trials())

    def trial_seconds(self) -> float | None:
        """Returns the mean duration of completed trials."""
        done = [trial.user_attrs["seconds"] for trial in self.trials() if trial.state == TrialState.COMPLETE]
        return mean(done) if done else None

    def best(self) -> FrozenTrial | None:
        return _best(self.trials())

    def run_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def claim(self, limit: int | None) -> ClaimedTrial | None:
        """Locks an unfinished trial or a new one. Returns None if `limit` trials were started."""
        with FileLock(self.folder / ".lock", timeout=LOCK_SECONDS):
            trials = self.trials()
            for frozen in trials:
                if frozen.state == TrialState.RUNNING and (lock := self._lock(frozen.number)) is not None:
                    self._require_ended(frozen.number)
                    return self._claimed(optuna.Trial(self._sampling(frozen.number), frozen._trial_id), True, lock)
            waiting = [trial.number for trial in trials if trial.state == TrialState.WAITING]
            if limit is not None and len(trials) - len(waiting) >= limit:
                return None
            number = waiting[0] if waiting else len(trials)
            lock = self._lock(number)
            assert lock is not None  # new trials start only under the folder's lock
            return self._claimed(self._sampling(number).ask(), False, lock)

    def _claimed(self, trial: optuna.Trial, resumed: bool, lock: FileLock) -> ClaimedTrial:
        unchanged = trial.user_attrs.get(UNCHANGED_CONFIG)
        values = {
            key: _suggest(trial, parameter)
            for key, parameter in self._space.items()
            if unchanged is None or key in unchanged
        }
        return ClaimedTrial(trial.number, values if unchanged is None else {}, resumed, trial, lock)

    def _sampling(self, number: int) -> optuna.Study:
        """Returns the study with a sampler for trial `number` that depends only on the seed and the results so far."""
        seed = derive_seed(self._seed, "tune", number) % (1 << 32)
        sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP_TRIALS, seed=seed, constant_liar=True)
        return optuna.load_study(study_name=NAME, storage=self._storage, sampler=sampler, pruner=self._pruner)

    def _lock(self, number: int) -> FileLock | None:
        folder = self.run_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".trial.lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            return None
        return lock

    def _require_ended(self, number: int) -> None:
        """Raises ConfigError if a trial's run is still alive although its search is not."""
        try:
            with FileLock(self.run_folder(number) / ".lock", timeout=SHUTDOWN_SECONDS):
                return
        except Timeout:
            with lock_run(self.run_folder(number)):
                return

    def report(self, claimed: ClaimedTrial, share: float, loss: float) -> bool:
        """Records the loss at this fraction of a trial. Returns True if the trial should be pruned."""
        part = round(share * self._length.evaluations)
        percent = round(100 * part / self._length.evaluations)
        if not 0 < percent < 100:  # the last evaluation is the trial's result
            return False
        claimed.trial.report(loss, percent)
        return claimed.number > 0 and claimed.trial.should_prune()

    def finish(self, claimed: ClaimedTrial, outcome: Outcome, measure: str) -> None:
        """Records how a trial ended, and deletes the models of all but the best trial."""
        trial = claimed.trial
        try:
            if outcome.state == "stopped":
                return
            trial.set_user_attr("seconds", outcome.seconds)
            trial.set_user_attr("measured", outcome.measured)
            if outcome.why:
                trial.set_user_attr("why", outcome.why)
            states = {name: state for state, name in STATES.items()}
            value = outcome.measured[measure] if outcome.state == "done" else None
            self.optuna_study.tell(trial, value, states[outcome.state])
            self._tidy()
        finally:
            claimed.lock.release()

    def _tidy(self) -> None:
        trials = self.trials()  # read once, because another worker may finish a better trial meanwhile
        best = _best(trials)
        for trial in trials:
            if trial.state.is_finished() and (best is None or trial.number != best.number):
                run = RunPaths(self.run_folder(trial.number))
                if not any(path.is_symlink() for path in (run.root, run.snapshots)):  # sansgpu creates no links
                    delete_snapshots(run.snapshots)
                    OutputFolder(run.final, "model").remove()


def _best(trials: list[FrozenTrial]) -> FrozenTrial | None:
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(done, key=lambda trial: (trial.value, trial.number), default=None)


def pruners() -> dict[str, optuna.pruners.BasePruner]:
    """Returns the pruners by their command-line name. Their steps are percentages of a trial."""
    return {
        "median": optuna.pruners.MedianPruner(PRUNER_STARTUP_TRIALS, PRUNER_WARMUP_PERCENT),
        "hyperband": optuna.pruners.HyperbandPruner(min_resource=10, max_resource=100),
        "none": optuna.pruners.NopPruner(),
    }


def require_same(folder: Path, recorded: Values, requested: Values) -> None:
    """Raises ConfigError if the study in `folder` has a different configuration or space from the requested one."""
    for what in ("configuration", "space"):
        before, now = (flatten(values[what]) for values in (recorded, requested))
        # The thread count depends on --workers and may differ.
        keys = [key for key in dict.fromkeys((*before, *now)) if key != "training.threads"]
        if (key := next((key for key in keys if before.get(key) != now.get(key)), None)) is not None:
            there, here = (json.dumps(values.get(key), default=str) for values in (before, now))
            raise ConfigError(
                f"{folder} contains a search with a different {what}: {key} was {there} and is now {here}; use the "
                f"same {what}, or choose another --output-dir."
            )


def _suggest(trial: optuna.Trial, parameter: SearchParameter) -> Any:
    """Returns a trial's value of one key, sampling it if the trial has none yet."""
    if parameter.choices:
        return trial.suggest_categorical(parameter.key, parameter.choices)
    low, high, log = parameter.low, parameter.high, parameter.log
    if parameter.is_integer:
        return trial.suggest_int(parameter.key, int(low), int(high), step=int(parameter.step or 1), log=log)
    return trial.suggest_float(parameter.key, low, high, step=parameter.step, log=log)


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
                metric = self._config.settings.main_metric.words(event)
                self._emit(TrialStep(claimed.number, event["step"], event["total_steps"], metric))

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

"""Optuna study of a search: trials in SQLite and per-trial locks. Several processes may share it."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.trial import FrozenTrial, TrialState

from sansgpu.config import ConfigError, RunPaths, SearchParameter, Space, derive_seed, flatten, spaced_values
from sansgpu.files.ownership import remove_folder
from sansgpu.jobs.tune.trial import Length, Outcome
from sansgpu.train.run_folders import lock_run
from sansgpu.train.snapshots import delete_snapshots

NAME = "tune"
STARTUP_TRIALS = 5  # the unchanged configuration and points spread over the space, before the sampler has data
PRUNER_STARTUP_TRIALS, PRUNER_WARMUP_PERCENT = 3, 30  # finished trials, and progress of a trial, before pruning it
LOCK_SECONDS = 600  # how long to wait while another worker plans
SHUTDOWN_SECONDS = 10  # time that a run has to end after its search was killed
STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}

Values = dict[str, Any]


@dataclass(frozen=True)
class ClaimedTrial:
    """A trial that this worker has locked."""

    number: int
    values: Values  # empty in trial 0, the unchanged configuration
    resumed: bool
    trial: optuna.Trial
    lock: FileLock


class Study:
    """A new or existing search in `folder`, with its trials/ and study.db."""

    def __init__(self, folder: Path, space: Space, pruner: str, seed: int, length: Length) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.folder, self._space, self._seed, self._length = folder, space, seed, length
        self._pruner = pruners()[pruner]
        url = f"sqlite:///{folder.absolute() / 'study.db'}"
        self._storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}})
        self.optuna = optuna.create_study(storage=self._storage, study_name=NAME, load_if_exists=True)

    def begin(self, default: Values) -> None:
        """Enqueues the startup trials that are missing. Trial 0 is the unchanged configuration; the sampler uses only
        its values that lie inside the space.
        """
        inside = {key: value for key, value in default.items() if self._space[key].contains(value)}
        for number in range(len(self.trials()), STARTUP_TRIALS):
            if number:
                self.optuna.enqueue_trial(spaced_values(self._space, number))
            else:
                self.optuna.enqueue_trial(inside, user_attrs={"as_it_is": list(inside)})

    def trials(self) -> list[FrozenTrial]:
        return list(self.optuna.get_trials(deepcopy=False))

    def begun_trials(self) -> int:
        return sum(trial.state != TrialState.WAITING for trial in self.trials())

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
            for frozen in self.trials():
                if frozen.state == TrialState.RUNNING and (lock := self._lock(frozen.number)) is not None:
                    self._require_ended(frozen.number)
                    return self._claimed(optuna.Trial(self._sampling(frozen.number), frozen._trial_id), True, lock)
            if limit is not None and self.begun_trials() >= limit:
                return None
            waiting = [trial.number for trial in self.trials() if trial.state == TrialState.WAITING]
            number = waiting[0] if waiting else len(self.trials())
            lock = self._lock(number)
            assert lock is not None  # new trials start only under the folder's lock
            return self._claimed(self._sampling(number).ask(), False, lock)

    def _claimed(self, trial: optuna.Trial, resumed: bool, lock: FileLock) -> ClaimedTrial:
        unchanged = trial.user_attrs.get("as_it_is")  # keys of the unchanged configuration that are in the space
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
            self.optuna.tell(trial, value, states[outcome.state])
            self._tidy()
        finally:
            claimed.lock.release()

    def _tidy(self) -> None:
        trials = self.trials()  # read once, because another worker may finish a better trial meanwhile
        best = _best(trials)
        for trial in trials:
            if trial.state.is_finished() and (best is None or trial.number != best.number):
                run = RunPaths(self.run_folder(trial.number))
                if not any(path.is_symlink() for path in (run.root, run.snapshots)):  # somebody else put it there
                    delete_snapshots(run.snapshots)
                    remove_folder(run.final, "model")


def _best(trials: list[FrozenTrial]) -> FrozenTrial | None:
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(done, key=lambda trial: (trial.value, trial.number), default=None)


def pruners() -> dict[str, optuna.pruners.BasePruner]:
    """Returns the pruners by their command-line name. Their steps are per cent of a trial."""
    return {
        "median": optuna.pruners.MedianPruner(PRUNER_STARTUP_TRIALS, PRUNER_WARMUP_PERCENT),
        "hyperband": optuna.pruners.HyperbandPruner(min_resource=10, max_resource=100),
        "none": optuna.pruners.NopPruner(),
    }


def require_same(folder: Path, recorded: Values, requested: Values) -> None:
    """Raises ConfigError if the study in `folder` has another configuration or space than requested."""
    for what in ("configuration", "space"):
        before, now = (flatten(values[what]) for values in (recorded, requested))
        # The thread count depends on --workers and may differ.
        keys = [key for key in dict.fromkeys((*before, *now)) if key != "training.threads"]
        if (key := next((key for key in keys if before.get(key) != now.get(key)), None)) is not None:
            there, here = (json.dumps(values.get(key), default=str) for values in (before, now))
            raise ConfigError(
                f"{folder} contains a search with another {what}: {key} is {there} there and {here} here; use the same "
                f"{what}, or choose another --output-dir."
            )


def _suggest(trial: optuna.Trial, parameter: SearchParameter) -> Any:
    """Returns a trial's value of one key, sampling it if the trial has none yet."""
    if parameter.choices:
        return trial.suggest_categorical(parameter.key, parameter.choices)
    low, high, log = parameter.low, parameter.high, parameter.log
    if parameter.is_integer:
        return trial.suggest_int(parameter.key, int(low), int(high), step=int(parameter.step or 1), log=log)
    return trial.suggest_float(parameter.key, low, high, step=parameter.step, log=log)

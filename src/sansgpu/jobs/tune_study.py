"""What a search keeps: its trials in SQLite, and which of them is in work. Several processes may share it."""

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

from sansgpu.config import ConfigError, Parameter, RunPaths, Space, fold_seed, spread
from sansgpu.jobs.folders import held_run
from sansgpu.jobs.tune_trial import Length, Outcome
from sansgpu.train.checkpoint import delete_snapshots
from sansgpu.watch.outputs import remove_folder

NAME = "tune"
SPREAD_TRIALS = 5  # with the first, spread over the space before there is anything to learn from
LEAST_FINISHED, LEAST_PERCENT = 3, 30  # trials, and how far one is, before it is compared with their median
LOCK_SECONDS = 600  # that one worker may take to plan, while others wait for it
DYING_SECONDS = 10  # a run whose search was killed is gone by then
STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}

Values = dict[str, Any]


@dataclass(frozen=True)
class Claimed:
    """A trial that this worker alone is at, as long as it holds the lock."""

    number: int
    values: Values  # none in the first, which is the configuration as it is
    resumed: bool
    trial: optuna.Trial
    lock: FileLock


class Study:
    """A search in `folder`: trials/ and study.db."""

    def __init__(self, folder: Path, space: Space, pruner: str, seed: int, length: Length) -> None:
        """Open it, or make it."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.folder, self._space, self._seed, self._length = folder, space, seed, length
        self._pruner = pruners()[pruner]
        url = f"sqlite:///{folder.absolute() / 'study.db'}"
        self._storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}})
        self.optuna = optuna.create_study(storage=self._storage, study_name=NAME, load_if_exists=True)

    def begin(self, default: Values) -> None:
        """Settle the first trials, unless they are. The very first is the configuration as it is, of which the
        sampler learns what lies in the space.
        """
        inside = {key: value for key, value in default.items() if self._space[key].contains(value)}
        for number in range(len(self.trials()), SPREAD_TRIALS):
            if number:
                self.optuna.enqueue_trial(spread(self._space, number))
            else:
                self.optuna.enqueue_trial(inside, user_attrs={"as_it_is": list(inside)})

    def trials(self) -> list[FrozenTrial]:
        """All, in the order of their numbers."""
        return list(self.optuna.get_trials(deepcopy=False))

    def begun(self) -> int:
        """Trials that count: all but those that wait."""
        return sum(trial.state != TrialState.WAITING for trial in self.trials())

    def finished(self) -> int:
        """Trials that are over."""
        return sum(trial.state.is_finished() for trial in self.trials())

    def trial_seconds(self) -> float | None:
        """That a trial took which ran to its end, in the mean."""
        done = [trial.user_attrs["seconds"] for trial in self.trials() if trial.state == TrialState.COMPLETE]
        return mean(done) if done else None

    def best(self) -> FrozenTrial | None:
        """The one with the least loss, of those that ran to their end."""
        return _best(self.trials())

    def run_folder(self, number: int) -> Path:
        """Of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    def claim(self, limit: int | None) -> Claimed | None:
        """A trial that was left unfinished, or a new one; None where `limit` trials were begun."""
        with FileLock(self.folder / ".lock", timeout=LOCK_SECONDS):
            for frozen in self.trials():
                if frozen.state == TrialState.RUNNING and (lock := self._lock(frozen.number)) is not None:
                    self._require_over(frozen.number)
                    return self._claimed(optuna.Trial(self._sampling(frozen.number), frozen._trial_id), True, lock)
            if limit is not None and self.begun() >= limit:
                return None
            waiting = [trial.number for trial in self.trials() if trial.state == TrialState.WAITING]
            number = waiting[0] if waiting else len(self.trials())
            lock = self._lock(number)
            assert lock is not None  # as new trials are begun under the folder's lock alone
            return self._claimed(self._sampling(number).ask(), False, lock)

    def _claimed(self, trial: optuna.Trial, resumed: bool, lock: FileLock) -> Claimed:
        """With its values: those it has, or drawn for it."""
        as_it_is = trial.user_attrs.get("as_it_is")
        values = {
            key: _drawn(trial, parameter)
            for key, parameter in self._space.items()
            if as_it_is is None or key in as_it_is
        }
        return Claimed(trial.number, values if as_it_is is None else {}, resumed, trial, lock)

    def _sampling(self, number: int) -> optuna.Study:
        """The study with a sampler of trial `number` alone: what it draws depends on results and seed, on no state."""
        seed = fold_seed(self._seed, "tune", number) % (1 << 32)
        sampler = optuna.samplers.TPESampler(n_startup_trials=SPREAD_TRIALS, seed=seed, constant_liar=True)
        return optuna.load_study(study_name=NAME, storage=self._storage, sampler=sampler, pruner=self._pruner)

    def _lock(self, number: int) -> FileLock | None:
        """The right to be at a trial; None where another process is."""
        folder = self.run_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".trial.lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            return None
        return lock

    def _require_over(self, number: int) -> None:
        """Raises ConfigError where a run goes on though the search that began it does not."""
        try:
            with FileLock(self.run_folder(number) / ".lock", timeout=DYING_SECONDS):
                return
        except Timeout:
            with held_run(self.run_folder(number)):
                return

    def report(self, claimed: Claimed, share: float, loss: float) -> bool:
        """Keep the loss at this share of a trial; True where it promises too little to go on."""
        part = round(share * self._length.evaluations)
        percent = round(100 * part / self._length.evaluations)
        if not 0 < percent < 100:  # the last is the trial's result
            return False
        claimed.trial.report(loss, percent)
        return claimed.number > 0 and claimed.trial.should_prune()

    def finish(self, claimed: Claimed, outcome: Outcome, measure: str) -> None:
        """Keep how a trial ended, and of all models that of the best alone."""
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
        trials = self.trials()  # of one moment: another worker may finish a better one
        best = _best(trials)
        for trial in trials:
            if trial.state.is_finished() and (best is None or trial.number != best.number):
                run = RunPaths(self.run_folder(trial.number))
                delete_snapshots(run.snapshots)
                remove_folder(run.final, "model")


def _best(trials: list[FrozenTrial]) -> FrozenTrial | None:
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(done, key=lambda trial: (trial.value, trial.number), default=None)


def pruners() -> dict[str, optuna.pruners.BasePruner]:
    """By what the command line calls them. They count in per cent of a trial."""
    return {
        "median": optuna.pruners.MedianPruner(LEAST_FINISHED, LEAST_PERCENT),
        "hyperband": optuna.pruners.HyperbandPruner(min_resource=10, max_resource=100),
        "none": optuna.pruners.NopPruner(),
    }


def require_same(folder: Path, kept: Values, asked: Values) -> None:
    """Raises ConfigError where the study in `folder` is of another configuration or space than asked for."""
    for what in ("configuration", "space"):
        before, now = (_flat(values[what]) for values in (kept, asked))
        # As many threads as there are shared out: they are no part of what is searched.
        keys = [key for key in dict.fromkeys((*before, *now)) if key != "training.threads"]
        if (key := next((key for key in keys if before.get(key) != now.get(key)), None)) is not None:
            there, here = (json.dumps(values.get(key), default=str) for values in (before, now))
            raise ConfigError(
                f"{folder} holds a search of another {what}: {key} is {there} there and {here} here; give what it was "
                "begun with, or choose another --output-dir."
            )


def _flat(values: Values) -> Values:
    """`training.learning_rate` and the like."""
    flat: Values = {}
    for name, value in values.items():
        inner = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        flat |= inner
    return flat


def _drawn(trial: optuna.Trial, parameter: Parameter) -> Any:
    """A trial's value of one key: the one it has already, or a new one."""
    if parameter.choices:
        return trial.suggest_categorical(parameter.key, parameter.choices)
    low, high, log = parameter.low, parameter.high, parameter.log
    if parameter.whole:
        return trial.suggest_int(parameter.key, int(low), int(high), step=int(parameter.step or 1), log=log)
    return trial.suggest_float(parameter.key, low, high, step=parameter.step, log=log)

"""Result of a search: its trials, and the files best.yaml, trials.csv and report.html."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

import optuna

from sansgpu.config import Config, SansGPUError, save_config
from sansgpu.files.atomic import atomic_write, write_failures_as
from sansgpu.jobs.tune.study import STATES, Study
from sansgpu.train.run_folders import open_any
from sansgpu.views.tune_events import SearchResult, TrialRow
from sansgpu.views.tune_report import write_tune_report

MIN_TRIALS_FOR_IMPORTANCE = 6

Values = dict[str, Any]


def result_of(study: Study, config: Config, default: Values, name: str, measure: str) -> SearchResult:
    """Returns the result that `tune --json` prints. `default` holds the unchanged configuration's values.

    Raises SansGPUError if no trial was completed.
    """
    rows = [_row(trial, default, measure) for trial in study.trials() if trial.state != optuna.trial.TrialState.WAITING]
    best = study.best()
    if best is None:
        why = next((row.why for row in rows if row.why), "the time budget was too short for one.")
        raise SansGPUError(f"no trial was completed: {why}")
    order = {"done": 0, "pruned": 1, "unfinished": 2, "failed": 3}
    rows.sort(key=lambda row: (order[row.state], row.loss is None, row.loss or 0.0, row.trial))
    unchanged = next((row for row in rows if row.trial == 0 and row.state == "done"), None)
    lowest, before = rows[0].loss, unchanged.loss if unchanged else None
    return SearchResult(
        name=name,
        task=config.task,
        measure=measure,
        folder=str(study.folder),
        best=rows[0],
        default=unchanged,
        gain=None if before is None or lowest is None else 1 - lowest / before,
        importance=_importance(study),
        seconds=sum(row.seconds for row in rows),
        trials=rows,
        files=[str(study.folder / name) for name in ("best.yaml", "trials.csv", "report.html")],
    )


def write_files(result: SearchResult, study: Study, chosen: Callable[[Values], Config]) -> None:
    """Writes best.yaml, trials.csv and report.html. Raises SansGPUError if they cannot be written."""
    folder = study.folder
    with write_failures_as(SansGPUError, folder):
        with atomic_write(folder / "best.yaml") as partial:
            save_config(open_any(chosen(result.best.parameters)), partial)
        _write_csv(result, study)
        write_tune_report(result, study.optuna, folder)


def _row(trial: optuna.trial.FrozenTrial, default: Values, measure: str) -> TrialRow:
    measured = trial.user_attrs.get("measured", {})
    return TrialRow(
        trial=trial.number,
        state=STATES.get(trial.state, "unfinished"),
        loss=measured.get(measure),
        bits_per_byte=measured.get("bits_per_byte"),
        step=measured.get("step"),
        parameters=default if "as_it_is" in trial.user_attrs else trial.params,
        seconds=trial.user_attrs.get("seconds", 0.0),
        why=trial.user_attrs.get("why"),
    )


def _importance(study: Study) -> dict[str, float]:
    """Returns Optuna's hyperparameter importances, or nothing if too few trials were completed."""
    done = [trial for trial in study.trials() if trial.state == optuna.trial.TrialState.COMPLETE]
    if len(done) < MIN_TRIALS_FOR_IMPORTANCE:
        return {}
    return dict(optuna.importance.get_param_importances(study.optuna))


def _write_csv(result: SearchResult, study: Study) -> None:
    columns = ("trial", "state", "loss", "bits_per_byte", "step", "seconds", "why")
    with atomic_write(study.folder / "trials.csv") as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *result.keys])
        for row in result.trials:
            writer.writerow([*(getattr(row, name) for name in columns), *map(row.parameters.get, result.keys)])

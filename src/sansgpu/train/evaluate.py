"""Evaluation on the validation split."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from math import ceil

import torch

from sansgpu.config import derive_seed
from sansgpu.events.event import Event, finite
from sansgpu.events.progress import ReportProgress, ignore_progress
from sansgpu.machine.execution import Execution
from sansgpu.machine.untrusted.user_code import preserved_state
from sansgpu.models.generation.sampling import Sampling, reading
from sansgpu.tasks.task import (
    Collecting,
    Evaluator,
    FittedHead,
    GatheringEvaluator,
    RankingEvaluator,
    SizedEvaluator,
    Sums,
    Task,
    add_sums,
)
from sansgpu.train.run import TrainingRun
from sansgpu.train.snapshots import Metrics
from sansgpu.train.state import TrainState


class Validation:
    """Evaluates a run on the validation split, at most once per step.

    If the task has a head that is fitted instead of trained (`FittedHead`), it is fitted at most once per step.
    """

    def __init__(self, task: Task, run: TrainingRun, state: TrainState, progress: ReportProgress) -> None:
        self._task, self._run, self._state, self._show = task, run, state, progress
        self._fitted_step: int | None = None  # the step whose weights the task's head was fitted to
        self._evaluated_step: int | None = None
        self._metrics: Metrics | None = None  # results of the evaluated step

    def restore(self, metrics: Metrics | None) -> None:
        """Sets the metrics of the step that the run was resumed from."""
        self._evaluated_step, self._metrics = self._state.progress.step, metrics

    @property
    def metrics(self) -> Metrics | None:
        """The results of the current step, or None if it was not evaluated."""
        return self._metrics if self._evaluated_step == self._state.progress.step else None

    @property
    def is_best(self) -> bool:
        """True if the current step was evaluated and has the lowest loss so far."""
        return self.metrics is not None and self._state.progress.best_step == self._state.progress.step

    def fit_head(self) -> None:
        """Fits the task's FittedHead, if it has one, to the current weights, for evaluations and snapshots."""
        step = self._state.progress.step
        if self._fitted_step != step:
            if isinstance(self._task, FittedHead):
                with _evaluating(self._task.model, self._run.execution):
                    self._task.fit_head(self._run.execution.micro_batch, self._run.execution.device)
            self._fitted_step = step

    def evaluate(self, stop: Callable[[], bool]) -> Event | None:
        """Evaluates the current step and updates the best one; returns the event.

        Returns None if the step was evaluated before, or if `stop` returned True.
        """
        progress, training, start = self._state.progress, self._run.config.training, time.perf_counter()
        if self.metrics is not None:
            return None
        self.fit_head()
        metrics = self._compute(stop)
        if metrics is None:
            return None
        self._evaluated_step, self._metrics = progress.step, finite(metrics)
        seconds, loss = time.perf_counter() - start, self._metrics["loss"]
        progress.add_evaluation(loss)
        epoch = self._run.epoch_after(progress.step)
        event: Event = {"event": "eval", "step": progress.step, "epoch": epoch, **self._metrics, "seconds": seconds}
        has_model = self._run.execution.group.is_main and self._run.sharding != "full"
        if training.sample_tokens and loss is not None and has_model:
            seed = derive_seed(training.seed, "sample", progress.step)
            sampling = Sampling(training.sample_temperature, seed=seed)
            with self._run.execution.autocast():
                event["sample"] = self._task.sample(training.sample_prompt, training.sample_tokens, sampling)
        return event

    def collect(self, is_stale: bool) -> None:
        """Merges the predictions of all ranks, if the task has any, after predicting again if `is_stale`."""
        if isinstance(self._task, Collecting):
            if is_stale:
                self._compute(lambda: False)
            self._task.collect(self._run.execution.group.all_gather_object)

    def _compute(self, stop: Callable[[], bool]) -> dict[str, float] | None:
        batches = self._run.config.training.eval_batches
        return evaluate(self._task.evaluator, self._run.execution, batches, stop, self._show)


@contextmanager
def _evaluating(model: torch.nn.Module, execution: Execution) -> Iterator[None]:
    """Disables dropout and gradients, and computes in the run's precision."""
    with preserved_state(), reading(model), torch.no_grad(), execution.autocast():
        yield


def evaluate(
    task: Evaluator,
    execution: Execution,
    batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: ReportProgress = ignore_progress,
) -> dict[str, float] | None:
    """Returns the task's metrics on the validation split, or on its first `batches`; None if `stop` returned True."""
    metrics = evaluate_batches(task, execution, batches, stop, progress)
    return None if metrics is None else metrics | rank_sample(task, execution, progress)


def rank_sample(task: Evaluator, execution: Execution, progress: ReportProgress = ignore_progress) -> dict[str, float]:
    """Returns the metrics that a task computes on a sample of the validation split only."""
    if not isinstance(task, RankingEvaluator):
        return {}
    with reading(task.model):
        return task.rank_sample(execution.device, execution.precision, progress)


def evaluate_batches(
    task: Evaluator,
    execution: Execution,
    batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: ReportProgress = ignore_progress,
) -> dict[str, float] | None:
    """Returns the metrics of `evaluate` that are computed on batches.

    In each round every rank evaluates one batch; the sums are added up over all ranks at the end.
    """
    sums: Sums = {}
    group, size = execution.group, execution.micro_batch
    with _evaluating(task.model, execution):
        chosen = islice(task.validation_batches(size), batches)
        total = _batch_count(task, size, batches)
        for done in count(step=group.size):
            progress("evaluating", min(done, total or done), total, "batch")
            if not (turn := list(islice(chosen, group.size))):
                break
            if group.all_reduce_max(float(stop())):
                return None
            # In a short last round all ranks still run a forward pass, but each batch counts once.
            batch = turn[min(group.rank, len(turn) - 1)]
            found = task.evaluate(batch.to(execution.device))
            if group.rank < len(turn):
                add_sums(sums, found)
    if isinstance(task, GatheringEvaluator):
        task.gather(group.all_gather_rows)
    return task.metrics(group.all_reduce_sums(sums))


def _batch_count(task: Evaluator, size: int, limit: int | None) -> int:
    """Returns the number of batches to evaluate, or 0 if it is unknown."""
    if not isinstance(task, SizedEvaluator):
        return 0
    every = ceil(task.validation_examples / size)
    return every if limit is None else min(every, limit)

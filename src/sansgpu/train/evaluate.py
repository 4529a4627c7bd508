"""Evaluation on the validation split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from math import ceil

import torch

from sansgpu.config import TrainingConfig
from sansgpu.data.shards import ReportProgress, ignore_progress
from sansgpu.machine.memory import effective_batch
from sansgpu.models.generation.sampling import reading
from sansgpu.tasks.task import (
    Evaluator,
    FittedHead,
    GatheringEvaluator,
    RankingEvaluator,
    SizedEvaluator,
    Sums,
    Task,
    add_sums,
)
from sansgpu.train.step import StepPlan


def eval_token_ratio(
    training: TrainingConfig, validation_tokens: int, example_tokens: float, micro_batch: int
) -> float:
    """Returns tokens per evaluation / tokens per step."""
    tokens: float = validation_tokens
    if training.eval_batches is not None:
        tokens = min(tokens, training.eval_batches * micro_batch * example_tokens)
    return tokens / (effective_batch(training) * example_tokens)


@contextmanager
def _evaluating(model: torch.nn.Module, plan: StepPlan) -> Iterator[None]:
    """Disables dropout and gradients, and computes in the plan's precision."""
    with reading(model), torch.no_grad(), plan.autocast():
        yield


def fit_head(task: Task, plan: StepPlan) -> None:
    """Fits the head of a task that has a fitted one to the current weights."""
    if isinstance(task, FittedHead):
        with _evaluating(task.model, plan):
            task.fit_head(plan.micro_batch, plan.device)


def _batch_count(task: Evaluator, size: int, limit: int | None) -> int:
    """Returns the number of batches to evaluate, or 0 if it is unknown."""
    if not isinstance(task, SizedEvaluator):
        return 0
    every = ceil(task.validation_examples / size)
    return every if limit is None else min(every, limit)


def evaluate(
    task: Evaluator,
    plan: StepPlan,
    batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: ReportProgress = ignore_progress,
) -> dict[str, float] | None:
    """Returns the task's metrics on the validation split, or on its first `batches`; None if `stop` returned True."""
    metrics = evaluate_batches(task, plan, batches, stop, progress)
    return None if metrics is None else metrics | rank_sample(task, plan, progress)


def rank_sample(task: Evaluator, plan: StepPlan, progress: ReportProgress = ignore_progress) -> dict[str, float]:
    """Returns the metrics that a task computes on a sample of the validation split only."""
    if not isinstance(task, RankingEvaluator):
        return {}
    with reading(task.model):
        return task.rank_sample(plan.device, plan.precision, progress)


def evaluate_batches(
    task: Evaluator,
    plan: StepPlan,
    batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: ReportProgress = ignore_progress,
) -> dict[str, float] | None:
    """Returns the metrics of `evaluate` that are computed on batches.

    In each round every rank evaluates one batch; the sums are added up over all ranks at the end.
    """
    sums: Sums = {}
    group = plan.group
    with _evaluating(task.model, plan):
        chosen = islice(task.validation_batches(plan.micro_batch), batches)
        total = _batch_count(task, plan.micro_batch, batches)
        for done in count(step=group.size):
            progress("evaluating", min(done, total or done), total, "batch")
            if not (turn := list(islice(chosen, group.size))):
                break
            if group.all_reduce_max(float(stop())):
                return None
            # In a short last round all ranks still run a forward pass, but each batch counts once.
            batch = turn[min(group.rank, len(turn) - 1)]
            found = task.evaluate(batch.to(plan.device))
            if group.rank < len(turn):
                add_sums(sums, found)
    if isinstance(task, GatheringEvaluator):
        task.gather(group.all_gather_rows)
    return task.metrics(group.all_reduce_sums(sums))

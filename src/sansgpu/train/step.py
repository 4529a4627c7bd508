"""A training step: forward and backward over micro-batches, reduction, clipping and update.

S outputs of this rank's examples, D features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sansgpu.config import ConfigError, SansGPUError, derive_seed
from sansgpu.data.batch import ExampleBatch
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.pressure import MemoryGuard, split_to_fit
from sansgpu.machine.untrusted.user_code import preserved_state
from sansgpu.tasks.task import COMPUTED_TOKENS, OnPolicyObjective, StepWideObjective, Sums, Task
from sansgpu.train.snapshots import LOSS, TARGETS
from sansgpu.train.state import TrainState


class NotFiniteError(SansGPUError):
    """The loss or the gradient of a step is infinite or NaN."""


@dataclass(frozen=True)
class StepResult:
    """The result of a training step."""

    loss_sum: float
    targets: int  # number of terms in loss_sum
    tokens: int  # tokens of all ranks; with an outer optimizer, all other fields describe this rank's share only
    computed_tokens: float  # of all ranks: without those that share a computation, but with repeated ones
    grad_norm: float
    sums: Sums  # task-specific sums
    phase_seconds: dict[str, float]  # generate (if the task generates text), forward, backward, reduce, update

    def logged_sums(self) -> Sums:
        """Returns the sums that step events report."""
        return {LOSS: self.loss_sum, TARGETS: self.targets, **self.sums}


class _PhaseTimer:
    """A stopwatch for the phases of a step."""

    def __init__(self) -> None:
        self.seconds = dict[str, float]()
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the time since the last call to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def train_step(
    state: TrainState, task: Task, batch: ExampleBatch, lr: float, guard: MemoryGuard | None = None
) -> StepResult:
    """Accumulates the gradient of `batch` in micro-batches, clips it and updates the weights.

    If the task is an OnPolicyObjective, the batch has only prompts, and their completions are generated first.

    The summed loss is divided by the number of targets of the global batch, so the result does not depend on how the
    batch is split. With an outer optimizer, the step is that of this rank alone, on its share of the batch. `guard`
    splits micro-batches that would not fit into memory. Raises NotFiniteError before any weight changes if the loss or
    the gradient norm is not finite.
    """
    optimizer, execution, phases, tokens = state.optimizer, state.execution, _PhaseTimer(), batch.token_count()
    device, group = execution.device, state.step_group
    if state.outer is not None:
        batch = state.outer.share(batch)
    if isinstance(task, OnPolicyObjective):
        with execution.autocast():
            batch = task.complete(batch, group)
        tokens = batch.token_count()
        phases.lap("generate")
    targets = batch.target_count()
    seed = partial(_seed_dropout, device, state.training.seed, state.progress.step, execution.group.rank)
    loss_of = _loss_function(task, batch, execution.micro_batch, group, seed)

    def forward(piece: ExampleBatch, later: Iterable[ExampleBatch], index: int) -> torch.Tensor:
        seed(index)
        with _around_loss(task), execution.autocast():
            loss = loss_of(piece.to(device), later, index)
        if not loss.requires_grad:
            raise SansGPUError(
                f"step {state.progress.step + 1}: the loss does not depend on any trained weight, e.g. because it was "
                "computed without gradients; correct the task's loss."
            )
        return loss

    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    pieces = batch.micro_batches(execution.micro_batch, group.rank, group.size)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _deterministic():
        for index, (loss, is_last) in enumerate(split_to_fit(pieces, forward, guard)):
            phases.lap("forward")
            with optimizer.backward_pass(accumulates=index > 0 or not is_last, is_last=is_last):
                (loss / max(1, targets)).backward()
            loss_sum += loss.detach()
            phases.lap("backward")
    optimizer.reduce()
    sums = group.all_reduce_sums({LOSS: float(loss_sum), **task.step_sums()})
    total = sums.pop(LOSS)
    phases.lap("reduce")
    grad_norm = optimizer.grad_norm()
    _require_finite(state.progress.step + 1, total / max(1, targets), grad_norm)
    limit = state.training.max_grad_norm
    scale = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
    optimizer.step(lr, state.progress.step + 1, scale)
    phases.lap("update")
    computed = sums[COMPUTED_TOKENS] * execution.group.size / group.size if COMPUTED_TOKENS in sums else float(tokens)
    return StepResult(total, targets, tokens, computed, grad_norm, sums, phases.seconds)


def _require_finite(step: int, loss: float, grad_norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise NotFiniteError(f"step {step}: the loss is {loss:g} and the gradient norm {grad_norm:g}")


def _around_loss(task: Task) -> AbstractContextManager[None]:
    """Returns a context for a task's loss, which may be code of the user. Ours needs none, which would take time."""
    return nullcontext() if type(task).__module__.startswith("sansgpu.") else preserved_state()


@contextmanager
def _deterministic() -> Iterator[None]:
    """Explains torch's error if an operation of the model has only a nondeterministic implementation on a GPU."""
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ConfigError(
            f"the model uses {operation}, which is not deterministic on a GPU, so that a resumed run could have other "
            "results; set device to cpu."
        ) from error


LossFunction = Callable[[ExampleBatch, Iterable[ExampleBatch], int], torch.Tensor]


def _loss_function(
    task: Task, batch: ExampleBatch, size: int, group: Group, seed: Callable[[int], None]
) -> LossFunction:
    """Returns a function (micro-batch, later micro-batches of the step, index) -> loss of the micro-batch.

    If the loss compares all examples of a step with each other, as in contrastive learning, a GradientCache computes
    it. The cache calls `seed` with the index of each later micro-batch whose outputs it computes ahead.
    """
    if not isinstance(task, StepWideObjective):
        return lambda piece, later, index: task.loss(piece)
    batches = [list(batch.micro_batches(size, rank, group.size)) for rank in range(group.size)]
    return GradientCache(task, group, batches, seed).loss


def _seed_dropout(device: torch.device, seed: int, step: int, rank: int, index: int) -> None:
    """Seeds the dropout of a micro-batch.

    On a CPU, only its generator is seeded: torch.manual_seed is slow, because it formats a stack trace per kind of GPU.
    """
    generator: Any = torch.default_generator if device.type == "cpu" else torch
    generator.manual_seed(derive_seed(seed, "dropout", step, index, rank))


class GradientCache:
    """Computes a loss over all examples of a step, e.g. a contrastive one, in the memory of one micro-batch.

    The method is GradCache (arXiv 2101.06983). Each micro-batch gets a loss of its own, and the gradients of these
    losses add up to the gradient of the step's loss.

    For the first micro-batch, the outputs of all later ones are computed, too, without gradients. The loss of all
    outputs, including those of other ranks, then gives the gradient of each output, which every micro-batch
    backpropagates.
    """

    def __init__(
        self, task: StepWideObjective, group: Group, batches: list[list[ExampleBatch]], seed: Callable[[int], None]
    ) -> None:
        """`batches` are the micro-batches of each rank; `seed(i)` seeds the dropout of this rank's micro-batch i."""
        self._task, self._group, self._batches, self._seed = task, group, batches, seed
        self._gradient: torch.Tensor | None = None  # (S, D)
        self._loss = torch.zeros(())
        self._used = 0  # rows of the gradient that earlier micro-batches have used

    def loss(self, piece: ExampleBatch, later: Iterable[ExampleBatch], index: int) -> torch.Tensor:
        """Returns the loss of the micro-batch `piece`, the one at `index`; `later` are those after it in the step.

        Its value is the loss of the full step for the first micro-batch, and 0 for the others.
        """
        outputs = self._task.outputs(piece)
        if self._gradient is None:
            rest = self._without_gradients(later, index + 1, outputs.device)
            self._gradient, self._loss = self._differentiate(torch.cat([outputs.detach(), *rest]))
        start, self._used = self._used, self._used + len(outputs)
        value = (outputs * self._gradient[start : self._used]).sum()
        loss, self._loss = self._loss, torch.zeros_like(self._loss)
        return value - value.detach() + loss

    @torch.no_grad()
    def _without_gradients(
        self, pieces: Iterable[ExampleBatch], index: int, device: torch.device
    ) -> Iterator[torch.Tensor]:
        for number, piece in enumerate(pieces, index):
            self._seed(number)  # the same masks as in the second pass
            yield self._task.outputs(piece.to(device))

    def _differentiate(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradient of this rank's outputs `own`, and the loss, which is 0 except on rank 0."""
        parts = self._group.all_gather_rows(own)
        outputs = torch.cat(parts).requires_grad_()
        loss = self._task.step_loss(outputs, [piece.to(own.device) for rank in self._batches for piece in rank])
        (gradient,) = torch.autograd.grad(loss, outputs)
        mine = gradient.split([len(part) for part in parts])[self._group.rank]
        return mine, loss.detach() if self._group.is_main else torch.zeros_like(loss)

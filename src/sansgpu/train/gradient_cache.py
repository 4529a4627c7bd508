"""Computes a loss that relates all examples of a step, in the memory of one micro-batch (GradCache, arXiv 2101.06983).

S outputs of this rank's examples, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from sansgpu.data.batch import ExampleBatch
from sansgpu.machine.group import Group
from sansgpu.tasks.task import StepWideObjective


class GradientCache:
    """The loss of a step, as one loss per micro-batch whose gradients add up to that of the step.

    With the first micro-batch, the outputs of all later ones are computed without gradients. The loss of all outputs,
    including those of other ranks, then gives the gradient of each output, from which every micro-batch continues.
    """

    def __init__(
        self,
        task: StepWideObjective,
        group: Group,
        batches: list[list[ExampleBatch]],
        seed: Callable[[int], None],
    ) -> None:
        """`batches` are the micro-batches of each rank; `seed` seeds the dropout of this rank's, by number."""
        self._task, self._group, self._batches, self._seed = task, group, batches, seed
        self._gradient: torch.Tensor | None = None  # (S, D)
        self._loss = torch.zeros(())
        self._used = 0  # rows of the gradient that earlier micro-batches have used

    def loss(self, piece: ExampleBatch, later: Iterable[ExampleBatch], index: int) -> torch.Tensor:
        """Returns the loss of the micro-batch `piece`, number `index`, before those `later` in the step.

        The value of the first one is the whole loss of the step; that of the others is 0.
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

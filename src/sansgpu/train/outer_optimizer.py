"""Local SGD with an outer optimizer: DiLoCo (arXiv 2311.08105), for `training.sync_every`.

Between two synchronizations, every rank trains on its share of each batch without any communication. A synchronization
averages the change of the weights over ranks, and the outer optimizer, SGD with Nesterov momentum, applies the average
to the weights that all ranks had after the last one.

Unlike in the paper, the moments of the inner optimizer are averaged, too, in bf16. All ranks then have the same state,
so a snapshot is no larger with more ranks, and a run can be resumed with a different number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sansgpu.config.training import TrainingConfig
from sansgpu.data.batch import ExampleBatch
from sansgpu.machine.distributed.group import Group
from sansgpu.train.gradient_reduction import BUCKET_BYTES, message_dtype
from sansgpu.train.update_rules import TrainedWeight

# The paper's momentum is 0.9, for hundreds of synchronizations. With tens of them, 0.7 reaches lower losses; measured.
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.7
MOMENT_DTYPE = torch.bfloat16  # data type in which moments are sent
_MOMENTUM = "outer_momentum"


def is_outer(name: str) -> bool:
    """Returns whether a tensor of a snapshot belongs to the outer optimizer."""
    return name.startswith(f"{_MOMENTUM}.")


class OuterOptimizer:
    """Synchronizes the weights and moments of ranks that train by themselves."""

    def __init__(self, weights: list[TrainedWeight], group: Group, training: TrainingConfig) -> None:
        self._weights, self._group = weights, group
        self._dtype = message_dtype(training)
        self._synchronized = {w.name: w.master.clone() for w in weights}  # weights after the last synchronization
        self.momenta = {f"{_MOMENTUM}.{w.name}": torch.zeros_like(w.master) for w in weights}

    def share(self, batch: ExampleBatch) -> ExampleBatch:
        """Returns this rank's examples of a batch; if the batch has fewer examples than ranks, one without targets."""
        rank, ranks = self._group.rank, self._group.size
        start, stop = (len(batch) * part // ranks for part in (rank, rank + 1))
        return batch.rows(start, stop) if stop > start else batch.without_targets(1)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Averages changes and moments over all ranks, and applies the outer step to the weights.

        Frozen weights are left out, because the outer momentum would change them.
        """
        weights = [weight for weight in self._weights if weight.parameter.requires_grad]
        for weight in weights:
            weight.master.sub_(self._synchronized[weight.name])
        average([w.master for w in weights], self._group, self._dtype)
        average([moment for w in weights for moment in w.moments.values()], self._group, MOMENT_DTYPE)
        for weight in weights:
            change, momentum = weight.master, self.momenta[f"{_MOMENTUM}.{weight.name}"]
            momentum.mul_(OUTER_MOMENTUM).add_(change)
            new = self._synchronized[weight.name]
            new.add_(change.add_(momentum, alpha=OUTER_MOMENTUM), alpha=OUTER_LR)
            weight.master.copy_(new)
            if weight.working is not None:
                weight.working.copy_(new)

    @torch.no_grad()
    def load(self, name: str, full: torch.Tensor) -> None:
        """Loads the outer momentum of a snapshot, or registers a trained weight that was loaded from it."""
        target = self.momenta if is_outer(name) else self._synchronized
        if name in target:
            target[name].copy_(full)


def average(tensors: Sequence[torch.Tensor], group: Group, dtype: torch.dtype) -> None:
    """Averages tensors over all ranks, in place, in messages of about BUCKET_BYTES."""
    for message in _messages(tensors, dtype):
        flat = torch.cat([tensor.flatten() for tensor in message]).to(dtype)
        group.wait(group.all_reduce_async(flat))
        flat /= group.size
        for tensor, part in zip(message, flat.split([tensor.numel() for tensor in message]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _messages(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    message: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        more = tensor.numel() * dtype.itemsize
        if message and size + more > BUCKET_BYTES:
            yield message
            message, size = [], 0
        message.append(tensor)
        size += more
    if message:
        yield message

"""Gradient reduction over ranks, overlapped with backward (Li et al. 2020, arXiv 2006.15704).

torch's DistributedDataParallel is not used, because by default it does not guarantee three things: an error names the
lost rank, a resumed run has the same bytes (buckets never change), and a gradient that one rank owns is summed for that
rank only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist

from sansgpu.config.training import TrainingConfig
from sansgpu.machine.distributed.group import Group
from sansgpu.train.sharding import OwnedByRank
from sansgpu.train.update_rules import TrainedWeight

BUCKET_BYTES = 25 << 20  # large enough for full network throughput, small enough to start early
_ALIGNMENT = 16  # elements: one cache line of fp32


def flat_size(weights: Sequence[TrainedWeight]) -> int:
    """Returns the number of elements of a flat tensor with room for all weights."""
    return sum(_padded(w) for w in weights)


def slots(flat: torch.Tensor, weights: Sequence[TrainedWeight]) -> list[torch.Tensor]:
    """Returns a view into a flat tensor for each weight, in the weight's shape."""
    starts = [0, *accumulate(_padded(w) for w in weights)]
    return [flat[a : a + w.master.numel()].view(w.master.shape) for w, a in zip(weights, starts, strict=False)]


def _padded(weight: TrainedWeight) -> int:
    return -(-weight.master.numel() // _ALIGNMENT) * _ALIGNMENT


def message_dtype(training: TrainingConfig) -> torch.dtype:
    """Returns the data type in which values are summed over ranks."""
    return torch.bfloat16 if training.gradient_reduction == "bf16" else torch.float32


@dataclass
class _Bucket:
    """Weights whose gradients are reduced in one message, to rank `owner` or to all ranks if it is None."""

    weights: list[TrainedWeight]
    owner: int | None
    arrived: set[str] = field(default_factory=set)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    @property
    def device(self) -> torch.device:
        return self.weights[0].parameter.device


class Reducer:
    """Sums gradients over all ranks in `dtype` while backward is still running.

    If one rank owns a weight, only that rank gets its sum. Sums are bitwise identical on all ranks and in every run,
    because the buckets, their order and gloo's summation order are fixed.
    """

    def __init__(self, group: Group, weights: list[TrainedWeight], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._buckets = _buckets(weights, dtype)
        self._bucket_of = {w.name: bucket for bucket in self._buckets for w in bucket.weights}
        self._started = 0
        self._open = False

    def open(self) -> None:
        """Announces this rank's last backward pass of the step, in which gradients become complete."""
        self._open = True

    def arrived(self, weight: TrainedWeight) -> None:
        """Records that a weight's gradient is complete. Complete buckets are sent in order."""
        if not self._open:
            return
        self._bucket_of[weight.name].arrived.add(weight.name)
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if len(bucket.arrived) < len(bucket.weights):
                return
            self._start(bucket)

    def close(self) -> None:
        """Sends the remaining buckets, waits for all sums and stores them as the weights' gradients."""
        self._open = False
        while self._started < len(self._buckets):
            self._start(self._buckets[self._started])
        for bucket in self._buckets:
            assert bucket.work is not None
            assert bucket.flat is not None
            self._group.wait(bucket.work)
            is_target = bucket.owner in (None, self._group.rank)
            for weight, slot in zip(bucket.weights, slots(bucket.flat, bucket.weights), strict=True):
                weight.gradient = slot if is_target else None
            bucket.work = bucket.flat = None
            bucket.arrived = set()
        self._started = 0

    def _start(self, bucket: _Bucket) -> None:
        bucket.flat = flat = torch.zeros(flat_size(bucket.weights), dtype=self._dtype, device=bucket.device)
        for weight, slot in zip(bucket.weights, slots(flat, bucket.weights), strict=True):
            if weight.gradient is not None:
                slot.copy_(weight.gradient)
                weight.gradient = None
        self._started += 1
        if bucket.owner is None:
            bucket.work = self._group.all_reduce_async(flat)
        else:
            bucket.work = self._group.reduce_async(flat, bucket.owner)


def _buckets(weights: list[TrainedWeight], dtype: torch.dtype) -> list[_Bucket]:
    """Returns buckets in reverse model order, the likely order in which backward computes gradients."""
    buckets: list[_Bucket] = []
    size = 0
    for weight in reversed(weights):
        owner = weight.placement.owner if isinstance(weight.placement, OwnedByRank) else None
        more = weight.master.numel() * dtype.itemsize
        if not buckets or buckets[-1].owner != owner or size + more > BUCKET_BYTES:
            buckets.append(_Bucket([], owner))
            size = 0
        buckets[-1].weights.append(weight)
        size += more
    return buckets

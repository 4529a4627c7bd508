"""Gradients added up over ranks while backward still goes on (Li et al. 2020, arXiv 2006.15704)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sansgpu.machine.group import Group
from sansgpu.train.sharding import Owned

if TYPE_CHECKING:
    from sansgpu.train.optim import Weight

BUCKET_BYTES = 25 << 20  # sent together: large enough for the network's rate, small enough to begin early
_ALIGNMENT = 16  # numbers: a cache line of fp32


@dataclass
class _Bucket:
    """Weights whose gradients travel in one piece, to `owner` alone or to all."""

    weights: list[Weight]
    owner: int | None
    arrived: set[str] = field(default_factory=set)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.weights[0].parameter.device

    def slots(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each weight's place in it."""
        sizes = [-(-w.master.numel() // _ALIGNMENT) * _ALIGNMENT for w in self.weights]
        starts = [0, *accumulate(sizes)]
        return [flat[a : a + w.master.numel()].view(w.master.shape) for w, a in zip(self.weights, starts, strict=False)]

    def numbers(self) -> int:
        """Of all slots."""
        return sum(-(-w.master.numel() // _ALIGNMENT) * _ALIGNMENT for w in self.weights)


class Reducer:
    """Sums gradients over all ranks while backward is still running, sent as `dtype`. The sum of a weight that one
    rank owns arrives on that rank only.

    Sums are bitwise identical on all ranks and in every run: buckets, their order and gloo's order of adding are fixed.
    """

    def __init__(self, group: Group, weights: list[Weight], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._buckets = _buckets(weights, dtype)
        self._of = {w.name: bucket for bucket in self._buckets for w in bucket.weights}
        self._begun = 0
        self._open = False

    def open(self) -> None:
        """The next backward pass is this rank's last one of the step: a gradient is complete when it arrives."""
        self._open = True

    def arrived(self, weight: Weight) -> None:
        """Record that a weight's gradient is complete. A full bucket is sent once all buckets before it were sent."""
        if not self._open:
            return
        self._of[weight.name].arrived.add(weight.name)
        while self._begun < len(self._buckets):
            bucket = self._buckets[self._begun]
            if len(bucket.arrived) < len(bucket.weights):
                return
            self._leave(bucket)

    def close(self) -> None:
        """Send the buckets that are left, wait for all sums and put them in the gradients' place."""
        self._open = False
        while self._begun < len(self._buckets):
            self._leave(self._buckets[self._begun])
        for bucket in self._buckets:
            assert bucket.work is not None
            assert bucket.flat is not None
            self._group.finish(bucket.work)
            kept = bucket.owner in (None, self._group.rank)
            for weight, slot in zip(bucket.weights, bucket.slots(bucket.flat), strict=True):
                weight.gradient = slot if kept else None
            bucket.work = bucket.flat = None
            bucket.arrived = set()
        self._begun = 0

    def _leave(self, bucket: _Bucket) -> None:
        bucket.flat = flat = torch.zeros(bucket.numbers(), dtype=self._dtype, device=bucket.device)
        for weight, slot in zip(bucket.weights, bucket.slots(flat), strict=True):
            if weight.gradient is not None:
                slot.copy_(weight.gradient)
                weight.gradient = None
        self._begun += 1
        if bucket.owner is None:
            bucket.work = self._group.sum_later(flat)
        else:
            bucket.work = self._group.sum_at_later(flat, bucket.owner)


def _buckets(weights: list[Weight], dtype: torch.dtype) -> list[_Bucket]:
    """Of weights as they stand in the model, in the order in which backward is likely to leave them."""
    buckets: list[_Bucket] = []
    size = 0
    for weight in reversed(weights):
        owner = weight.place.owner if isinstance(weight.place, Owned) else None
        more = weight.master.numel() * dtype.itemsize
        if not buckets or buckets[-1].owner != owner or size + more > BUCKET_BYTES:
            buckets.append(_Bucket([], owner))
            size = 0
        buckets[-1].weights.append(weight)
        size += more
    return buckets

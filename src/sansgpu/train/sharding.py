"""Where each trained tensor is kept: on all ranks, on one of them, or a few rows on each.

`training.sharding` chooses. `none`: every rank has everything. `optimizer`: masters and moments of a weight are with
the rank that updates it (ZeRO-1, arXiv 1910.02054). `full`: besides, the matrices of the blocks are cut into rows and
put together only while they are used (ZeRO-3, by torch's fully_shard), and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from sansgpu.machine.group import Group
from sansgpu.models.modules import blocks_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class Place(Protocol):
    """Where a tensor is kept."""

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank keeps of it; of nothing a tensor without memory (meta device)."""

    def gather(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The whole of `shape` on rank 0; of no use on others. All ranks call it in the same order."""

    def everywhere(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The whole of `shape` on every rank that updates some of it."""


class Everywhere:
    """On every rank."""

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """All of it."""
        return whole

    def gather(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What is there already."""
        return mine

    def everywhere(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What is there already."""
        return mine


EVERYWHERE = Everywhere()


class Owned:
    """On one rank."""

    def __init__(self, group: Group, owner: int) -> None:
        self._group, self.owner = group, owner

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """All of it on the owner."""
        return whole if self._group.rank == self.owner else whole.to("meta")

    def gather(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Handed to rank 0."""
        return self._group.hand(mine, self.owner, 0)

    def everywhere(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What the owner, which alone updates it, has."""
        return mine


class Rows:
    """Some rows on each rank, as many as torch's fully_shard gives it."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of this rank."""
        return self._cut(whole)[self._group.rank]

    def gather(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Put together on rank 0."""
        pieces = self._cut(torch.empty(shape, dtype=mine.dtype, device="meta"))
        got = [
            self._group.hand(mine if rank == self._group.rank else piece, rank, 0)
            for rank, piece in enumerate(pieces)
            if len(piece)
        ]
        return torch.cat(got) if self._group.first else mine

    def everywhere(self, mine: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Put together on every rank."""
        most = -(-shape[0] // self._group.size)
        padded = mine.new_zeros(most, *shape[1:])
        padded[: len(mine)] = mine
        return torch.cat(self._group.collect(padded))[: shape[0]]

    def _cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        pieces = list(whole.chunk(self._group.size))
        return pieces + [whole[:0]] * (self._group.size - len(pieces))


def spread(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """An owner for every weight of so many numbers: neighbours together, each rank about as many."""
    total, seen, owners = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        owners[name] = min(ranks - 1, (seen + size // 2) * ranks // max(1, total))
        seen += size
    return owners


def shard_blocks(model: nn.Module, group: Group, compute_dtype: torch.dtype) -> set[str]:
    """Cut the matrices of the model's repeated blocks into rows, in place; returns their names.

    Blocks are put together one at a time, for their pass forward and again for that backward, in `compute_dtype`;
    gradients are added up in fp32. What is no matrix stays whole, as it is small and read in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh  # a second of imports that other runs never need
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    blocks = blocks_of(model)
    names = {id(p): name for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (group.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    cut: set[str] = set()
    for block in blocks:
        whole = {p for p in block.parameters() if p.ndim < 2 or not p.requires_grad}
        cut |= {names[id(p)] for p in block.parameters() if p not in whole}
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=True)
        assert isinstance(block, FSDPModule)
        block.set_gradient_divide_factor(1.0)  # the loss is divided by the targets of all ranks
        block.set_force_sum_reduction_for_comms(True)  # gloo supports no other
        block.set_reduce_scatter_unused_params(True)  # other ranks may have used them
    return cut


def on_gradient(model: nn.Module, used: dict[str, Callable[[], None]]) -> None:
    """Call `used[name]` whenever backward computes a gradient of the sharded parameter `name` on this rank.

    A hook on the sharded parameter cannot know that: fully_shard gives it zeros where no rank used it. The hooks are on
    the gathered parameters that a block computes with, which are the same objects in every pass.
    """
    names = {module: name for name, module in model.named_modules()}
    for block in blocks_of(model):
        sharded = cast("FSDPModule", block)
        sharded.unshard()
        for name, parameter in block.named_parameters(names[block]):
            if name in used:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used[name]())
        sharded.reshard()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that this rank has of a tensor that is cut."""
    return cast("DTensor", tensor).to_local().detach()

"""Sharding: each trained tensor is replicated on all ranks, owned by one rank, or split by rows over all ranks.

`training.sharding` selects the mode. `none`: every rank has everything. `optimizer`: only the rank that updates a
weight has its master weight and moments (ZeRO-1, arXiv 1910.02054). `full`: in addition, the matrices of the blocks and
their gradients are split by rows and gathered only while in use (ZeRO-3, with torch's fully_shard).

torch's ZeroRedundancyOptimizer and DTensor are not used for two reasons. A snapshot holds unsharded, named tensors, so
that a run can be resumed with a different sharding mode. And an error in any transfer must name the lost rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from sansgpu.machine.distributed.group import Group
from sansgpu.models.modules import blocks_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class Placement(Protocol):
    """The placement of a tensor on ranks. `shape` is always the unsharded shape."""

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part, or a tensor on the meta device if it has none."""

    def gather_to_main(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns the unsharded tensor on rank 0, undefined on other ranks. All ranks call it in the same order."""

    def all_gather(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns the unsharded tensor on every rank that updates a part of it."""


class Replicated:
    """Replicated on every rank."""

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        return full

    def gather_to_main(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return local

    def all_gather(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return local


REPLICATED = Replicated()


class OwnedByRank:
    """Stored on one rank, which alone updates it."""

    def __init__(self, group: Group, owner: int) -> None:
        self._group, self.owner = group, owner

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        return full if self._group.rank == self.owner else full.to("meta")

    def gather_to_main(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return self._group.transfer(local, self.owner, 0)

    def all_gather(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return local


class RowSharded:
    """Split by rows over all ranks, in the same way as torch's fully_shard."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        return self._split(full)[self._group.rank]

    def gather_to_main(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        pieces = self._split(torch.empty(shape, dtype=local.dtype, device="meta"))
        got = [
            self._group.transfer(local if rank == self._group.rank else piece, rank, 0)
            for rank, piece in enumerate(pieces)
            if len(piece)
        ]
        return torch.cat(got) if self._group.is_main else local

    def all_gather(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        max_rows = -(-shape[0] // self._group.size)
        padded = local.new_zeros(max_rows, *shape[1:])
        padded[: len(local)] = local
        return torch.cat(self._group.all_gather(padded))[: shape[0]]

    def _split(self, full: torch.Tensor) -> list[torch.Tensor]:
        pieces = list(full.chunk(self._group.size))
        return pieces + [full[:0]] * (self._group.size - len(pieces))


def assign_owners(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Assigns weights, given their numbers of elements, to ranks: contiguous ranges of about the same size."""
    total, seen, owners = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        owners[name] = min(ranks - 1, (seen + size // 2) * ranks // max(1, total))
        seen += size
    return owners


def shard_blocks(model: nn.Module, group: Group, compute_dtype: torch.dtype) -> set[str]:
    """Shards the matrices of the model's repeated blocks by rows, in place, and returns their names.

    Each block is gathered in `compute_dtype` for its forward pass and again for its backward pass; gradients are
    reduced in fp32. Vectors stay replicated, because they are small and used in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh  # takes a second to import
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    blocks = blocks_of(model)
    names = {id(p): name for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (group.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    cut: set[str] = set()
    for block in blocks:
        unsharded = {p for p in block.parameters() if p.ndim < 2 or not p.requires_grad}
        cut |= {names[id(p)] for p in block.parameters() if p not in unsharded}
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=unsharded, reshard_after_forward=True)
        assert isinstance(block, FSDPModule)
        block.set_gradient_divide_factor(1.0)  # the loss is divided by the targets of all ranks
        block.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
        block.set_reduce_scatter_unused_params(True)  # other ranks may have used them
    return cut


def register_gradient_hooks(model: nn.Module, used: dict[str, Callable[[], None]]) -> None:
    """Registers hooks that call `used[name]` when backward computes a gradient of parameter `name` on this rank.

    The hooks are on the gathered parameters, which are the same objects in every pass. Hooks on the sharded parameters
    would also fire for unused ones, to which fully_shard assigns zero gradients.
    """
    names = {module: name for name, module in model.named_modules()}
    for block in blocks_of(model):
        sharded = cast("FSDPModule", block)
        sharded.unshard()
        for name, parameter in block.named_parameters(names[block]):
            if name in used:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used[name]())
        sharded.reshard()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows of a sharded tensor."""
    return cast("DTensor", tensor).to_local().detach()

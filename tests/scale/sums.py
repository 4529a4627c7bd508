"""Compares gradients reduced over ranks with a float64 sum. Runs on every rank with a JSON list of cases."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.distributed.rendezvous import join
from sansgpu.machine.distributed.world import find_world
from sansgpu.train.optim import Optimizer
from sansgpu.train.sharding import OwnedByRank, RowSharded
from sansgpu.train.update_rules import TrainedWeight


class Block(nn.Module):
    """A module with one parameter of a given shape."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """Adds a term whose gradient is `gradient`; None leaves the parameter unused."""
        return x * 1.0 if gradient is None else x + (self.weight * gradient).sum()


class Model(nn.Module):
    """Blocks, some of which may be unused in a pass."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for shape in shapes)

    def loss(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        """Returns a loss whose gradient with respect to the blocks is `gradients`."""
        x = torch.zeros((), requires_grad=True)
        for block, gradient in zip(self.blocks, gradients, strict=True):
            x = block(x, gradient)
        return x


def gradients_of(case: dict[str, Any], rank: int, piece: int) -> list[torch.Tensor | None]:
    """Returns the gradients of one micro-batch of one rank; None for an unused parameter."""
    draw = torch.Generator().manual_seed((case["seed"] * 100 + rank) * 10 + piece)
    gradients: list[torch.Tensor | None] = [torch.randn(shape, generator=draw) for shape in case["shapes"]]
    for number in range(len(gradients)):
        skipped = rank == 1 and number == case["skipped"]
        if number in case["unused"] or skipped or (piece > 0 and number in case["early"]):
            gradients[number] = None
    return gradients


def check_gradients(group: Group, case: dict[str, Any]) -> None:
    training = TrainingConfig.model_validate(
        {"optimizer": "adamw", "gradient_reduction": case["wire"], "sharding": case["sharding"]}
    )
    model = Model(case["shapes"])
    optimizer = Optimizer(model, training, torch.float32, group)
    given = {
        (rank, piece): gradients_of(case, rank, piece) for rank in range(group.size) for piece in range(case["pieces"])
    }
    for _ in range(2):  # the second step fails if state of the first one remains
        for piece in range(case["pieces"]):
            loss = model.loss(given[group.rank, piece])
            with optimizer.backward_pass(accumulates=case["pieces"] > 1, is_last=piece == case["pieces"] - 1):
                loss.backward()
        optimizer.reduce()
        for weight in optimizer.weights:
            number = int(weight.name.split(".")[1])
            check_gradient(group, case, weight, [gradients[number] for gradients in given.values()])
        optimizer.zero_grad()


def check_gradient(group: Group, case: dict[str, Any], weight: TrainedWeight, given: list[torch.Tensor | None]) -> None:
    """Compares the gradient of a weight with the sum of those that all ranks were given for it."""
    parts = [gradient.double() for gradient in given if gradient is not None]
    elsewhere = isinstance(weight.placement, OwnedByRank) and weight.placement.owner != group.rank
    if elsewhere or not parts:
        assert weight.gradient is None, (case, weight.name)
        return
    assert weight.gradient is not None, (case, weight.name)
    expected = torch.stack(parts).sum(dim=0)
    mine = weight.placement.shard(expected) if isinstance(weight.placement, RowSharded) else expected
    tolerance = 1e-5 if case["wire"] == "fp32" else 0.03
    assert (weight.gradient.double() - mine).norm() <= tolerance * (1 + sum(p.norm() for p in parts)), (
        case,
        weight.name,
    )


def check_places(group: Group, shapes: list[list[int]]) -> None:
    for shape in shapes:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        for place in (RowSharded(group), OwnedByRank(group, group.size - 1)):
            mine = place.shard(whole)
            gathered = place.gather_to_main(mine, whole.shape)
            assert not group.is_main or torch.equal(gathered, whole), (shape, place)
            if isinstance(place, RowSharded):
                assert torch.equal(place.all_gather(mine, whole.shape), whole), shape


def check_agreement(group: Group) -> None:
    assert group.all_gather_object(f"r{group.rank}") == [f"r{rank}" for rank in range(group.size)]
    assert group.broadcast_object(lambda: {"rank": group.rank}) == {"rank": 0}
    assert group.all_reduce_max(float(group.rank)) == group.size - 1
    assert group.all_reduce_maxima([float(group.rank), -float(group.rank)]) == [group.size - 1, 0]
    sums = group.all_reduce_sums({"all": 0.1, f"only {group.rank}": 2.5})
    expected = sum(0.1 for _ in range(group.size))
    assert sums == {"all": expected, **{f"only {rank}": 2.5 for rank in range(group.size)}}


if __name__ == "__main__":
    together = join(find_world(), "gloo", 60.0, None)
    for one in json.loads(sys.argv[1]):
        check_gradients(together, one)
        check_places(together, one["shapes"])
    check_agreement(together)
    together.shutdown()

"""Run under torchrun: what ranks add up, held to a plain float64 sum. Arguments: JSON of shapes and settings."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.machine.group import Group
from sansgpu.machine.joining import join
from sansgpu.machine.world import find_world
from sansgpu.train.optim import Optimizer
from sansgpu.train.sharding import Owned, Rows


class Model(nn.Module):
    """Parameters of given shapes, of which some take no part."""

    def __init__(self, shapes: list[list[int]], unused: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.unused = unused

    def loss(self, gradients: list[torch.Tensor], skipped: int | None) -> torch.Tensor:
        """Its gradient is `gradients`, but for one that this rank leaves out."""
        terms = [
            (part * gradient).sum()
            for number, (part, gradient) in enumerate(zip(self.parts, gradients, strict=True))
            if number not in self.unused and number != skipped
        ]
        return torch.stack([*terms, torch.zeros((), requires_grad=True)]).sum()


def gradients_of(case: dict[str, Any], rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(case["seed"] * 1000 + rank)
    return [torch.randn(shape, generator=draw) for shape in case["shapes"]]


def check_gradients(group: Group, case: dict[str, Any]) -> None:
    training = TrainingConfig.model_validate(
        {"optimizer": "adamw", "gradient_reduction": case["wire"], "sharding": case["sharding"]}
    )
    model = Model(case["shapes"], case["unused"])
    optimizer = Optimizer(model, training, torch.float32, group)
    skipped = case["skipped"] if group.rank == 1 else None
    optimizer.expect_sum(case["pieces"] > 1)
    for piece in range(case["pieces"]):
        if piece == case["pieces"] - 1:
            optimizer.expect_whole()
        (model.loss(gradients_of(case, group.rank), skipped) / case["pieces"]).backward()
    optimizer.reduce()
    for number, weight in enumerate(sorted(optimizer.weights, key=lambda w: int(w.name.split(".")[1]))):
        parts = [
            gradients_of(case, rank)[number].double()
            for rank in range(group.size)
            if not (rank == 1 and number == case["skipped"])
        ]
        kept = not isinstance(weight.place, Owned) or weight.place.owner == group.rank
        if number in case["unused"] or not kept:
            assert weight.gradient is None, (case, number)
            continue
        assert weight.gradient is not None, (case, number)
        tolerance = 1e-5 if case["wire"] == "fp32" else 0.03
        assert (weight.gradient.double() - sum(parts)).norm() <= tolerance * (1 + sum(p.norm() for p in parts))


def check_places(group: Group, shapes: list[list[int]]) -> None:
    for shape in shapes:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        for place in (Rows(group), Owned(group, group.size - 1)):
            mine = place.mine(whole)
            gathered = place.gather(mine, whole.shape)
            assert not group.first or torch.equal(gathered, whole), (shape, place)
            if isinstance(place, Rows):
                assert torch.equal(place.everywhere(mine, whole.shape), whole), shape


def check_agreement(group: Group) -> None:
    assert group.gather(f"r{group.rank}") == [f"r{rank}" for rank in range(group.size)]
    assert group.decide(lambda: {"rank": group.rank}) == {"rank": 0}
    assert group.most(float(group.rank)) == group.size - 1
    sums = group.add_up({"all": 0.1, f"only {group.rank}": 2.5})
    expected = sum(0.1 for _ in range(group.size))
    assert sums == {"all": expected, **{f"only {rank}": 2.5 for rank in range(group.size)}}


if __name__ == "__main__":
    together = join(find_world(), "gloo", 60.0, None)
    for one in json.loads(sys.argv[1]):
        check_gradients(together, one)
        check_places(together, one["shapes"])
    check_agreement(together)
    together.leave()

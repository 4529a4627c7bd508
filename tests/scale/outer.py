"""Compares outer steps over ranks with float64. Runs on every rank with a JSON list of cases."""

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
from sansgpu.train.outer_optimizer import OUTER_LR, OUTER_MOMENTUM, OuterOptimizer

ROUNDS = 2


class Weights(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.ones(shape) for shape in shapes)


def change_of(case: dict[str, Any], rank: int, number: int, time: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(((case["seed"] * 10 + rank) * 10 + time) * 100 + number)
    return torch.randn(case["shapes"][number], generator=draw)


def check_outer_steps(group: Group, case: dict[str, Any]) -> None:
    training = TrainingConfig.model_validate({"optimizer": "sgd", "gradient_reduction": case["wire"]})
    model = Weights(case["shapes"])
    compute = torch.bfloat16 if case["narrow"] else torch.float32
    optimizer = Optimizer(model, training, compute)
    optimizer.allocate_moments()
    outer = OuterOptimizer(optimizer.weights, group, training)
    expected = {w.name: w.master.double().clone() for w in optimizer.weights}
    momenta = {name: torch.zeros_like(value) for name, value in expected.items()}
    for time in range(ROUNDS):
        for weight in optimizer.weights:
            mine = change_of(case, group.rank, int(weight.name.split(".")[1]), time)
            weight.master.add_(mine)
            weight.moments["momentum_buffer"].copy_(mine)
        outer.synchronize()
        for weight in optimizer.weights:
            number = int(weight.name.split(".")[1])
            changes = [change_of(case, rank, number, time).double() for rank in range(group.size)]
            mean = torch.stack(changes).mean(dim=0)
            momenta[weight.name] = OUTER_MOMENTUM * momenta[weight.name] + mean
            expected[weight.name] += OUTER_LR * (mean + OUTER_MOMENTUM * momenta[weight.name])
            tolerance = (1e-5 if case["wire"] == "fp32" else 0.03) * (1 + sum(float(c.norm()) for c in changes))
            assert (weight.master - expected[weight.name]).norm() <= ROUNDS * tolerance, (case, number)
            bf16 = 0.03 * (1 + sum(float(c.norm()) for c in changes))
            assert (weight.moments["momentum_buffer"] - mean).norm() <= bf16, (case, number)
            assert torch.equal(weight.parameter, weight.master.to(weight.parameter.dtype)), (case, number)
    for tensor in (*(w.master for w in optimizer.weights), *outer.momenta.values()):
        assert all(torch.equal(tensor, other) for other in group.all_gather(tensor)), case


if __name__ == "__main__":
    together = join(find_world(), "gloo", 60.0, None)
    for one in json.loads(sys.argv[1]):
        check_outer_steps(together, one)
    together.shutdown()

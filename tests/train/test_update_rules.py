"""Adam and SGD update weights as torch.optim does, and Muon orthogonalizes queries and keys by heads."""

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.kernels.newton_schulz import newton_schulz
from sansgpu.models import TransformerLM
from sansgpu.models.costing import MOMENTS
from sansgpu.train.optim import Optimizer
from sansgpu.train.update_rules import MUON

RATE, DECAY, SCALE = 0.05, 0.3, 0.5


class Stack(nn.Module):
    """Two matrices, which are decayed, and their biases, which are not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(12, 8), nn.Linear(8, 12)])
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)


def sgd(groups: Iterable[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=RATE, momentum=0.8)


def adam(groups: Iterable[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=RATE, betas=(0.8, 0.95))


@pytest.mark.parametrize(("name", "reference"), [("sgd", sgd), ("adam", adam)])
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_rule_equals_that_of_torch(
    name: str, reference: Callable[..., torch.optim.Optimizer], decay: float, compute_dtype: torch.dtype
) -> None:
    training = TrainingConfig.model_validate({"optimizer": name, "weight_decay": decay, "beta1": 0.8, "beta2": 0.95})
    ours, theirs = Stack(), Stack()
    optimizer = Optimizer(ours, training, compute_dtype)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    biases = [p for p in theirs.parameters() if p.ndim == 1]
    expected = reference([{"params": matrices, "weight_decay": decay}, {"params": biases}])
    draw = torch.Generator().manual_seed(2)
    for step in range(1, 6):
        for weight in optimizer.weights:
            gradient = torch.randn(weight.master.shape, generator=draw).to(weight.parameter.dtype)
            weight.gradient = gradient.clone()
            theirs.get_parameter(weight.name).grad = gradient.float() * SCALE
        optimizer.step(RATE, step, SCALE)
        expected.step()
    for weight in optimizer.weights:
        torch.testing.assert_close(weight.master, theirs.get_parameter(weight.name).detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weight.parameter.detach(), weight.master.to(weight.parameter.dtype))


def test_weight_decay_is_off_unless_given_where_it_is_added_to_the_gradient() -> None:
    assert TrainingConfig(optimizer="sgd").weight_decay == TrainingConfig(optimizer="adam").weight_decay == 0
    assert TrainingConfig(optimizer="adam", weight_decay=0.1).weight_decay == 0.1
    training = TrainingConfig()
    training.optimizer = "sgd"
    assert training.weight_decay == 0
    training.optimizer = "adamw"
    assert training.weight_decay == TrainingConfig().weight_decay > 0


@pytest.mark.parametrize("name", ["muon", "adamw", "adam", "sgd"])
def test_the_memory_of_moments_is_what_a_plan_estimates(name: str) -> None:
    optimizer = Optimizer(Stack(), TrainingConfig.model_validate({"optimizer": name}), torch.float32)
    optimizer.allocate_moments()
    sizes = {True: 0, False: 0}
    for weight in optimizer.weights:
        sizes[weight.parameter.ndim == 2] += weight.parameter.numel()
    in_matrix, elsewhere = MOMENTS[name, "fp32"]
    needed = sum(moment.nbytes for moment in optimizer.state_tensors().values())
    assert needed == in_matrix * sizes[True] + elsewhere * sizes[False]


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.sampled_from([4, 8]), st.sampled_from([16, 48]), st.integers(0, 99))
def test_muon_orthogonalizes_queries_and_keys_of_each_head_by_themselves(
    kv_heads: int, queries: int, head_dim: int, d_ff: int, seed: int
) -> None:
    heads = kv_heads * queries
    shape = {"d_model": heads * head_dim, "n_heads": heads, "n_kv_heads": kv_heads, "n_layers": 2, "d_ff": d_ff}
    model = TransformerLM(ModelConfig.model_validate({**shape, "vocab_size": 300, "activation": "relu2"}), seed)
    training = TrainingConfig.model_validate({"optimizer": "muon", "weight_decay": 0.5})
    optimizer = Optimizer(model, training, torch.float32)
    before, draw = {n: p.detach().clone() for n, p in model.named_parameters()}, torch.Generator().manual_seed(seed)
    gradients = {w.name: torch.randn(w.master.shape, generator=draw) for w in optimizer.weights}
    for weight in optimizer.weights:
        weight.gradient = gradients[weight.name].clone()
    optimizer.step(0.01, step=1, scale=1.0)

    def blocks(name: str, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return matrix.split(head_dim if name.endswith((".q.weight", ".k.weight")) else len(matrix))

    for weight in optimizer.weights:
        if weight.rule is not MUON:
            continue
        steps = (weight.master - before[weight.name] * (1 - 0.01 * 0.5)) / -0.01
        for step, gradient in zip(blocks(weight.name, steps), blocks(weight.name, gradients[weight.name]), strict=True):
            expected = newton_schulz(gradient[None].double(), torch.float64)[0] * 0.2 * max(gradient.shape) ** 0.5
            torch.testing.assert_close(step.double(), expected, rtol=1e-3, atol=1e-3, msg=weight.name)

"""Gradients of several micro-batches are summed in fp32, in place if our matmuls compute them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sansgpu.config import TrainingConfig
from sansgpu.kernels import library
from sansgpu.kernels.linear import Linear
from sansgpu.train.optim import Optimizer

ROWS = 300  # enough for our matmul kernels to be used


class Layers(nn.Module):
    """A layer that is used twice, once with checkpointing, and a layer whose weight a torch operation also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.mixed = Linear(24, 24), Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self.twice, x, use_reentrant=False) + self.twice(2 * x)
        return self.mixed(inner).float().square().sum() + (self.mixed.weight.float() ** 2).sum()


def summed_gradients(model: Layers, inputs: list[torch.Tensor], between: Callable[[], object]) -> list[torch.Tensor]:
    """Returns the summed gradients of bf16 weights. Asserts that every pass calls the hook of each weight once."""
    optimizer = Optimizer(model, TrainingConfig(optimizer="adamw"), torch.bfloat16)
    told: list[str] = []
    for weight in optimizer.weights:
        weight.on_gradient = lambda weight: told.append(weight.name)
    for x in inputs:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        with optimizer.backward_pass(accumulates=True):
            loss.backward()
        between()
    names = [weight.name for weight in optimizer.weights]
    assert sorted(told) == sorted(names * len(inputs))  # once per pass
    gradients = {weight.name: weight.gradient for weight in optimizer.weights}
    optimizer.release_state()
    return [gradients[name] for name, _ in model.named_parameters()]  # type: ignore[misc]


def test_gradients_are_summed_in_fp32_by_our_kernels_and_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, inputs = Layers(), [torch.randn(ROWS, 24) for _ in range(3)]

    def other_gradients() -> None:
        """Computes gradients that are not part of the sums."""
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(ROWS, 24, requires_grad=True)
            torch.autograd.grad(model.mixed(x).sum(), [x, model.mixed.weight])

    ours = summed_gradients(model, inputs, other_gradients)
    assert all(gradient.dtype == torch.float32 for gradient in ours)
    monkeypatch.setattr(library, "_loaded", False)
    plain = summed_gradients(model, inputs, lambda: None)
    for one, other in zip(ours, plain, strict=True):
        assert (one - other).norm() <= 0.01 * other.norm()
    assert all(p.gradient_sum is None for p in model.parameters())  # type: ignore[attr-defined]


def test_matmuls_add_gradients_without_rounding_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Linear(24, 40))
    optimizer = Optimizer(model, TrainingConfig(optimizer="adamw"), torch.bfloat16)
    exact = torch.zeros(40, 24, dtype=torch.float64)
    for _ in range(4):
        x, grad = (torch.randn(ROWS, size).bfloat16() for size in (24, 40))
        with optimizer.backward_pass(accumulates=True):
            model(x).backward(grad)
        exact += grad.double().T @ x.double()
    gradient = next(weight.gradient for weight in optimizer.weights if weight.name == "0.weight")
    assert gradient is not None
    assert (gradient - exact).norm() <= 1e-6 * exact.norm()

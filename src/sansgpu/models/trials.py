"""Trials that show whether a module of transformers computes what one of ours does, on small stand-ins of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Part(nn.Module):
    """Takes the place of a part of a module in a trial."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return torch.sin(self.number * hidden_states + self.number)


class AttentionPart(Part):
    """Takes the place of attention, which also returns its weights or None."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> Any:
        return super().forward(hidden_states), None


class LinearPart(nn.Module):
    """Takes the place of a linear layer in a trial."""

    def __init__(self, inputs: int, outputs: int, number: int) -> None:
        super().__init__()
        self.weight = torch.sin((number + 1) * random_tensor(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@contextmanager
def replaced_parts(module: nn.Module, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    before = dict(module._modules)
    module._modules.update(parts)
    try:
        yield
    finally:
        module._modules.update(before)


def random_tensor(*shape: int) -> torch.Tensor:
    """Returns the same random values in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def agree(found: Callable[[], object], expected: Callable[[], torch.Tensor]) -> bool:
    """Returns True if a trial gives what is expected; False if it fails, as that of any other code may."""
    try:
        value = found()
    except Exception:
        return False
    return isinstance(value, torch.Tensor) and torch.allclose(value, expected(), rtol=1e-4, atol=1e-5)

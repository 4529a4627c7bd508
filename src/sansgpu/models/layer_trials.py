"""Replaces a layer of a transformers model by one of ours if a trial shows that both compute the same.

In a trial, cheap functions replace the submodules of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Part(nn.Module):
    """A cheap function that replaces a submodule in a trial."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return torch.sin(self.number * hidden_states + self.number)


class AttentionPart(Part):
    """Replaces an attention layer in a trial. Returns its output and None for the attention weights."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        return super().forward(hidden_states), None


class LinearPart(nn.Module):
    """Replaces a linear layer in a trial."""

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
    """Returns True if both functions return equal tensors; False otherwise, or if one raises an error."""
    try:
        value, other = found(), expected()
        return isinstance(value, torch.Tensor) and torch.allclose(value, other, rtol=1e-4, atol=1e-5)
    except Exception:
        return False


def tried(recognize: Callable[[Any], T], module: nn.Module) -> T | None:
    """Returns what `recognize` returns for a module; None if it raises an error, as for an unknown kind of layer."""
    try:
        return recognize(module)
    except Exception:
        return None


_subclasses: dict[tuple[type, type], type] = {}


def with_forward(mixin: type, original: type) -> type:
    """Returns a subclass of `original` with the forward pass of `mixin`.

    It must be a subclass, because transformers looks for layers by class. It is cached, so that all blocks of a model
    have the same class and torch.compile compiles one graph.
    """
    if (mixin, original) not in _subclasses:
        _subclasses[mixin, original] = type(original.__name__, (mixin, original), {"__module__": original.__module__})
    return _subclasses[mixin, original]

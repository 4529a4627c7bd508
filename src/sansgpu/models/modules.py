"""What models of ours and of others are made of: repeated blocks, and weights that begin without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Table(nn.Embedding):
    """nn.Embedding that draws no values on the meta device: to do so imports torch's compiler, a second for nothing."""

    def reset_parameters(self) -> None:
        """N(0, 1), where there is memory for it."""
        if not self.weight.is_meta:
            super().reset_parameters()


def without_values(model: nn.Module) -> None:
    """Give a model on the meta device memory for its weights. `to_empty` does, but imports sympy: half a second."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Its repeated blocks, in order: the longest list of modules with parameters."""
    lists: list[Any] = [
        m for m in model.modules() if isinstance(m, nn.ModuleList) and any(True for _ in m.parameters())
    ]
    return list(max(lists, key=len, default=[]))

"""Converts the weights of mixtures of experts between transformers' layout and llama.cpp's.

transformers stacks the gate and up projections of all experts in one weight (E, 2F, D); llama.cpp has two of (E, F, D).
E experts, F hidden units of an expert, D width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from sansgpu.models.formats.weights import StoredTensor, as_stored

_GATE_UP = ".experts.gate_up_proj"


def separate_experts(
    weights: Mapping[str, torch.Tensor | StoredTensor],
) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
    """Yields all weights; splits those of experts into a gate, an up and a down projection, as in llama.cpp."""
    for name, weight in weights.items():
        if name.endswith(".experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith(_GATE_UP):
            experts, both, width = weight.shape
            for part, which in enumerate(("gate", "up")):
                half = partial(_half, as_stored(weight), part)
                yield name.replace("gate_up", which) + ".weight", StoredTensor((experts, both // 2, width), half)
        else:
            yield name, weight


def _half(weight: StoredTensor, part: int) -> torch.Tensor:
    return weight.read().chunk(2, dim=1)[part]


def stack_experts(found: dict[str, StoredTensor]) -> None:
    """Inverts `separate_experts`, in place."""
    for name in sorted(name for name in found if ".experts." in name):  # gate_proj before up_proj
        stored = found.pop(name)
        name = name.removesuffix(".weight")
        if not name.endswith((".gate_proj", ".up_proj")):
            found[name] = stored
        elif name.endswith(".gate_proj"):
            up = found[name.replace("gate_proj", "up_proj") + ".weight"]
            experts, features, width = stored.shape
            both = partial(_stacked, stored, up)
            found[name.replace("gate", "gate_up")] = StoredTensor((experts, 2 * features, width), both)


def _stacked(gate: StoredTensor, up: StoredTensor) -> torch.Tensor:
    return torch.cat((gate.read(), up.read()), dim=1)

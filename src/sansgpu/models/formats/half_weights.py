"""Divides weights that llama.cpp stores as two, and joins them again.

transformers stacks the gate and up projections of all experts in one weight (E, 2F, D); llama.cpp has two of (E, F, D).
Some families do the same with a single feed-forward layer. E experts, F hidden units, D width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from sansgpu.kernels.block_quantization import QuantizedWeight
from sansgpu.models.family import block_pattern
from sansgpu.models.formats.weights import StoredTensor, as_stored

_GATE_UP = ".experts.gate_up_proj"
Halves = Mapping[str, tuple[str, str]]  # module of transformers, with "{}" for the block -> names of its two halves


def separate_halves(
    weights: Mapping[str, torch.Tensor | StoredTensor], halves: Halves
) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
    """Yields all weights; splits those of experts and of `halves` into two, as in llama.cpp."""
    for name, weight in weights.items():
        if name.endswith(".experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith(_GATE_UP):
            yield from _split(weight, [name.replace("gate_up", which) + ".weight" for which in ("gate", "up")], 1)
        else:
            module, number = block_pattern(name.removesuffix(".weight"))
            if number and module in halves:
                yield from _split(weight, [f"{half.format(number)}.weight" for half in halves[module]], 0)
            else:
                yield name, weight


def _split(weight: torch.Tensor | StoredTensor, names: list[str], dim: int) -> Iterator[tuple[str, StoredTensor]]:
    shape = list(weight.shape)
    shape[dim] //= 2
    for part, name in enumerate(names):
        yield name, StoredTensor(tuple(shape), partial(_half, as_stored(weight), part, dim))


def _half(weight: StoredTensor, part: int, dim: int) -> torch.Tensor:
    return weight.read().chunk(2, dim)[part]


def stack_halves(found: dict[str, StoredTensor], halves: Halves) -> None:
    """Inverts `separate_halves`, in place."""
    for name in sorted(name for name in found if ".experts." in name):  # gate_proj before up_proj
        stored = found.pop(name)
        name = name.removesuffix(".weight")
        if not name.endswith((".gate_proj", ".up_proj")):
            found[name] = stored
        elif name.endswith(".gate_proj"):
            up = found[name.replace("gate_proj", "up_proj") + ".weight"]
            found[name.replace("gate", "gate_up")] = _stacked(stored, up, 1)
    firsts = {first: (whole, second) for whole, (first, second) in halves.items()}
    for name in list(found):
        first, number = block_pattern(name.removesuffix(".weight"))
        if first in firsts:
            whole, second = (f"{module.format(number)}.weight" for module in firsts[first])
            found[whole] = _stacked(found.pop(name), found.pop(second), 0)


def _stacked(first: StoredTensor, second: StoredTensor, dim: int) -> StoredTensor:
    """Joins two tensors. Matrices with the same quantization are joined without dequantizing them."""
    shape = list(first.shape)
    shape[dim] += second.shape[dim]
    joined = StoredTensor(tuple(shape), lambda: torch.cat((first.read(), second.read()), dim))
    one, other = first.blocks, second.blocks
    if one is None or other is None or first.quantized_as != second.quantized_as:
        return joined

    def blocks() -> QuantizedWeight:
        return QuantizedWeight(torch.cat((one().data, other().data)), one().format)

    return StoredTensor(joined.shape, joined.read, blocks, first.quantized_as)

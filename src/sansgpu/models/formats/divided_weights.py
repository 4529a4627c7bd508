"""Divides weights that llama.cpp stores as several, and joins them again.

transformers stacks the gate and up projections of all experts in one weight (E, 2F, D); llama.cpp has two of (E, F, D).
gpt-oss has (E, D, 2F), in which gate and up alternate, and a bias (E, 2F). Other weights whose rows are divided depend
on the family. E experts, F hidden units, D width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate

import torch

from sansgpu.kernels.block_quantization import QuantizedWeight
from sansgpu.models.family import Division, block_pattern
from sansgpu.models.formats.weights import StoredTensor, as_stored

_BIAS = "_bias"  # end of the names of biases of experts
Divisions = Mapping[str, Division]  # by module of transformers, with "{}" for the block


def divide(
    weights: Mapping[str, torch.Tensor | StoredTensor], divisions: Divisions, alternate: bool
) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
    """Yields all weights, and splits the weights of experts and of `divisions` as llama.cpp does.

    `alternate` says that gates and values of experts alternate.
    """
    for name, weight in weights.items():
        module, number = block_pattern(name.removesuffix(".weight"))
        if ".experts." in name:
            yield from _expert_weights(name, weight, alternate)
        elif module in divisions:
            division, stored = divisions[module], as_stored(weight)
            ends = accumulate(division.rows.values())
            for (part, rows), end in zip(division.rows.items(), ends, strict=True):
                read = partial(_part, stored, division, slice(end - rows, end))
                yield f"{part.format(number)}.weight", StoredTensor((rows, *stored.shape[1:]), read)
        else:
            yield name, weight


def _expert_weights(
    name: str, weight: torch.Tensor | StoredTensor, alternate: bool
) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
    suffix = ".bias" if name.endswith(_BIAS) else ".weight"
    name = name.removesuffix(_BIAS) + suffix
    if "gate_up" not in name:
        yield name, weight
        return
    for part, which in enumerate(("gate", "up")):
        yield name.replace("gate_up", which), _half(weight, part, alternate)


def _half(weight: torch.Tensor | StoredTensor, part: int, alternate: bool) -> StoredTensor:
    shape = list(weight.shape)
    shape[-1 if alternate else 1] //= 2

    def read() -> torch.Tensor:
        whole = as_stored(weight).read()
        return whole[..., part::2] if alternate else whole.chunk(2, 1)[part]

    return StoredTensor(tuple(shape), read)


def _part(weight: StoredTensor, division: Division, place: slice) -> torch.Tensor:
    rows = weight.read()
    return (rows if division.order is None else division.order.to_file(rows))[place]


def join(found: dict[str, StoredTensor], divisions: Divisions, alternate: bool) -> None:
    """Inverts `divide`, in place."""
    for name in sorted(name for name in found if ".experts." in name):  # gate_proj before up_proj
        stored = found.pop(name)
        module, _, parameter = name.rpartition(".")
        ending = _BIAS if parameter == "bias" else ""
        if not module.endswith((".gate_proj", ".up_proj")):
            found[module + ending] = stored
        elif module.endswith(".gate_proj"):
            up = found[name.replace("gate_proj", "up_proj")]
            found[module.replace("gate", "gate_up") + ending] = (
                _alternating(stored, up) if alternate else _joined([stored, up], None, 1)
            )
    firsts = {next(iter(division.rows)): (module, division) for module, division in divisions.items()}
    for name in list(found):
        first, number = block_pattern(name.removesuffix(".weight"))
        if first in firsts:
            module, division = firsts[first]
            parts = [found.pop(f"{part.format(number)}.weight") for part in division.rows]
            found[f"{module.format(number)}.weight"] = _joined(parts, division, 0)


def _alternating(gate: StoredTensor, up: StoredTensor) -> StoredTensor:
    shape = (*gate.shape[:-1], 2 * gate.shape[-1])
    return StoredTensor(shape, lambda: torch.stack((gate.read(), up.read()), -1).flatten(-2))


def _joined(parts: list[StoredTensor], division: Division | None, dim: int) -> StoredTensor:
    """Joins tensors. Matrices with the same quantization are joined without dequantizing them."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)

    def in_order(rows: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(rows, dim)
        return whole if division is None or division.order is None else division.order.from_file(whole)

    joined = StoredTensor(tuple(shape), lambda: in_order([part.read() for part in parts]))
    if any(part.blocks is None or part.quantized_as != parts[0].quantized_as for part in parts):
        return joined

    def blocks() -> QuantizedWeight:
        read = [part.blocks() for part in parts if part.blocks is not None]
        return QuantizedWeight(in_order([one.data for one in read]), read[0].format)

    return StoredTensor(joined.shape, joined.read, blocks, parts[0].quantized_as)

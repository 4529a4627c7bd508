"""Rotary embeddings whose frequencies depend on the longest row that is read: dynamic NTK scaling and LongRoPE.

transformers derives them from the largest position of a forward pass (`dynamic_rope_update` of its
modeling_rope_utils.py), so that what a short example gives would depend on the others in its micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


class LengthDependentRotary:
    """The length-dependent rotary embeddings of a model; most have none."""

    def __init__(self, model: nn.Module) -> None:
        found: list[Any] = [
            m for m in model.modules() if hasattr(m, "rope_type") and hasattr(m, "original_max_seq_len")
        ]
        scaled = [(module, name, kind) for module in found for name, kind in _kinds(module)]
        self._dynamic = [(module, name) for module, name, kind in scaled if "dynamic" in kind]
        self._growing = [int(module.original_max_seq_len) for module, _ in self._dynamic]
        self._switching = [_trained_length(module, name) for module, name, kind in scaled if kind == "longrope"]

    def __bool__(self) -> bool:
        return bool(self._growing or self._switching)

    @property
    def unscaled(self) -> int | None:
        """The most tokens of an example that is not scaled by its length; None if none is."""
        return min(self._growing + self._switching, default=None)

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """The numbers of the examples that have the same frequencies, and so may be read together."""
        found: dict[tuple[int, ...], list[int]] = {}
        for number, length in enumerate(lengths):
            grown, switched = (max(length, limit) for limit in self._growing), (length > n for n in self._switching)
            found.setdefault((*grown, *switched), []).append(number)
        return list(found.values())

    def forget(self) -> None:
        """Drops what earlier forward passes left: dynamic scaling otherwise keeps the longest row's frequencies."""
        for module, name in self._dynamic:
            cached = f"{name}_max_seq_len_cached" if name else "max_seq_len_cached"
            setattr(module, cached, module.original_max_seq_len)
            prefix = f"{name}_" if name else ""
            original = getattr(module, f"{prefix}original_inv_freq")
            current = getattr(module, f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original.to(current.device), persistent=False)


def _kinds(module: Any) -> Iterator[tuple[str | None, str]]:
    """(layer type, kind of scaling); one for all layer types has the name None."""
    if isinstance(module.rope_type, dict):
        yield from module.rope_type.items()
    else:
        yield None, str(module.rope_type)


def _trained_length(module: Any, layer_type: str | None) -> int:
    parameters = module.config.rope_parameters
    return int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])

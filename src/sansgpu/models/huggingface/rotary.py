"""Rotary embeddings whose frequencies depend on the sequence length: dynamic NTK scaling and LongRoPE.

transformers derives the frequencies from the largest position in a forward pass (`dynamic_rope_update` in
modeling_rope_utils.py). So the output for a short example would depend on the longest one in its micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


class LengthDependentRotary:
    """The length-dependent rotary embeddings of a model. Evaluates to False if it has none, as most models."""

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = [
            m for m in model.modules() if hasattr(m, "rope_type") and hasattr(m, "original_max_seq_len")
        ]
        scaled = [(module, name, kind) for module in modules for name, kind in _rope_types(module)]
        self._dynamic = [(module, name) for module, name, kind in scaled if "dynamic" in kind]
        self._growing = [int(module.original_max_seq_len) for module, _ in self._dynamic]
        self._switching = [_trained_length(module, name) for module, name, kind in scaled if kind == "longrope"]

    def __bool__(self) -> bool:
        return bool(self._growing or self._switching)

    @property
    def unscaled(self) -> int | None:
        """The number of tokens up to which frequencies do not depend on length; None if they never do."""
        return min(self._growing + self._switching, default=None)

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Groups the indices of examples with equal frequencies, which may share a forward pass."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, length in enumerate(lengths):
            grown, switched = (max(length, limit) for limit in self._growing), (length > n for n in self._switching)
            groups.setdefault((*grown, *switched), []).append(index)
        return list(groups.values())

    def reset(self) -> None:
        """Resets dynamic scaling, which otherwise keeps the frequencies of the longest sequence so far."""
        for module, name in self._dynamic:
            cached = f"{name}_max_seq_len_cached" if name else "max_seq_len_cached"
            setattr(module, cached, module.original_max_seq_len)
            prefix = f"{name}_" if name else ""
            original = getattr(module, f"{prefix}original_inv_freq")
            current = getattr(module, f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original.to(current.device), persistent=False)


def _rope_types(module: Any) -> Iterator[tuple[str | None, str]]:
    """Yields (layer type, RoPE type); the layer type is None if all layers share one RoPE type."""
    if isinstance(module.rope_type, dict):
        yield from module.rope_type.items()
    else:
        yield None, str(module.rope_type)


def _trained_length(module: Any, layer_type: str | None) -> int:
    parameters = module.config.rope_parameters
    return int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])

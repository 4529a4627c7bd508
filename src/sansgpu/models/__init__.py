"""Model architectures, their file formats and what they cost to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sansgpu.models.decoder import CausalLMOutput, KeyValueCache, TransformerLM

__all__ = ["CausalLMOutput", "KeyValueCache", "TransformerLM"]


def __getattr__(name: str) -> Any:
    """Imports the decoder on first use, because configurations are validated with this package, but without torch."""
    if name not in __all__:
        raise AttributeError(f"module sansgpu.models has no attribute {name}")
    from sansgpu.models import decoder

    return getattr(decoder, name)

"""Runs our attention kernel in transformers models.

B batch, T queries, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sansgpu.kernels.attention import AttentionKernel, attention, visible_keys

if TYPE_CHECKING:  # functions import transformers when they need it, because it is slow and optional
    from transformers import PreTrainedModel


class PackedMask(Protocol):
    """Which tokens attend to each other in a forward pass."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel) -> torch.Tensor:
        """Computes attention with a kernel; q (B, H, T, d), k and v (B, K, S, d); returns (B, H, T, d)."""


@dataclass(frozen=True)
class KeyRanges:
    """A mask in which each query sees one contiguous range of keys, (B, T, 2)."""

    ranges: torch.Tensor

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel) -> torch.Tensor:
        return kernel(q, k, v, self.ranges)


NAME = "sansgpu"
_PACKED = "_sansgpu_packed_mask"  # attribute of a mask: the PackedMask that computes the attention


def use_our_attention(model: PreTrainedModel) -> bool:
    """Makes a model use our attention kernel if transformers would use SDPA; returns True if the model now uses it.

    Leaves other models unchanged: neither SDPA nor our kernel supports softcapping or attention sinks.
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation != "sdpa" or getattr(config, "attn_logit_softcapping", None):
        return False
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def ranges_of(mask: torch.Tensor) -> torch.Tensor | None:
    """Converts a mask (B, 1, T, S) to key ranges (B, T, 2) int32; None if visible keys are not contiguous."""
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    visible = mask[:, 0].int()
    count, first = visible.sum(-1), visible.argmax(-1)
    end = visible.shape[-1] - visible.flip(-1).argmax(-1)
    empty = count == 0
    if not bool(((end - first == count) | empty).all()):
        return None
    return torch.stack((first.masked_fill(empty, 0), end.masked_fill(empty, 0)), dim=-1).int()


def stand_in_mask(mask: PackedMask, device: torch.device) -> torch.Tensor:
    """Returns a tensor that carries a mask to every layer, so that no (B, 1, T, T) mask is built.

    transformers passes four-dimensional masks through unchanged.
    """
    stand_in = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    setattr(stand_in, _PACKED, mask)
    return stand_in


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Builds the mask of SDPA, even if SDPA could do without, and computes its key ranges once for all layers."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None
    if (ranges := ranges_of(mask)) is not None:
        setattr(mask, _PACKED, KeyRanges(ranges))
    return mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention; query (B, H, T, d), key and value (B, K, S, d); returns (B, T, H, d)."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor | None) -> torch.Tensor:
        if q.dtype != v.dtype and torch.is_autocast_enabled(q.device.type):  # rotary embeddings give fp32
            q, k = q.to(v.dtype), k.to(v.dtype)
        uniform = q.dtype == k.dtype == v.dtype and q.shape[-1] == v.shape[-1]
        if ranges is None or not uniform or any(kwargs.get(name) is not None for name in ("position_bias", "cache")):
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            mask = attention_mask
            if ranges is not None and mask is not None and mask.shape[-1] != k.shape[2]:
                mask = visible_keys(ranges, k.shape[2])  # the mask is a stand-in
            out = sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, is_causal, **kwargs)[0]
            return out.transpose(1, 2)
        root = q.shape[-1] ** 0.5
        if scaling is not None and scaling * root != 1.0:
            q = q * (scaling * root)
        return attention(q, k, v, ranges, dropout)

    packed: PackedMask | None = getattr(attention_mask, _PACKED, None)
    if attention_mask is None:
        packed = KeyRanges(_default_ranges(module, query, key, is_causal))
    out = kernel(query, key, value, None) if packed is None else packed.attend(query, key, value, kernel)
    return out.transpose(1, 2).contiguous(), None


def _default_ranges(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, is_causal: bool | None
) -> torch.Tensor:
    """Returns the key ranges that SDPA uses without a mask: all keys, or those up to the query if it is causal."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    end = torch.arange(1, queries + 1).clamp(max=keys) if causal and queries > 1 else torch.full((queries,), keys)
    return torch.stack((torch.zeros_like(end), end), dim=-1).int().expand(batch, queries, 2).contiguous()

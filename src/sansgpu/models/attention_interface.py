"""Runs our attention kernel in transformers models.

B batch, T queries, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sansgpu.kernels.attention import attention, visible_keys
from sansgpu.models.pair_layout import PairLayout

NAME = "sansgpu"
_RANGES = "_sansgpu_ranges"  # attribute of a mask: the key range of each query, if each sees one contiguous range
_LAYOUT = "_sansgpu_layout"  # attribute of a mask: where the tokens of answers are that share their prompt


def use_our_attention(model: PreTrainedModel) -> bool:
    """Makes a model use our attention kernel if transformers would use SDPA; returns True if the model now uses it.

    Leaves other models unchanged: neither SDPA nor our kernel supports softcapping or attention sinks.
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation != "sdpa" or getattr(config, "attn_logit_softcapping", None):
        return False
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


def ranges_mask(ranges: torch.Tensor, layout: PairLayout | None = None) -> torch.Tensor:
    """Returns a stand-in mask that carries key ranges (B, T, 2) to every layer, so that no (B, 1, T, T) mask is built.

    With a `layout`, only attention gives each answer a prompt of its own, and the ranges are those of its tokens.
    transformers passes four-dimensional masks through unchanged.
    """
    mask = torch.ones(len(ranges), 1, 1, 1, dtype=torch.bool, device=ranges.device)
    setattr(mask, _RANGES, ranges)
    setattr(mask, _LAYOUT, layout)
    return mask


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Builds the mask of SDPA, even if SDPA could do without, and computes its key ranges once for all layers."""
    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None
    setattr(mask, _RANGES, ranges_of(mask))
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
    layout: PairLayout | None = getattr(attention_mask, _LAYOUT, None)
    if layout is not None:
        query, key, value = (layout.expand(part, 2) for part in (query, key, value))
    ranges = getattr(attention_mask, _RANGES, None)
    if attention_mask is None:
        ranges = _default_ranges(module, query, key, is_causal)
    if query.dtype != value.dtype and torch.is_autocast_enabled(query.device.type):  # rotary embeddings give fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
    uniform = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    unsupported = any(kwargs.get(name) is not None for name in ("position_bias", "cache"))
    if ranges is None or not uniform or unsupported:
        if ranges is not None and attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
            attention_mask = visible_keys(ranges, key.shape[2])  # replaces the stand-in of `ranges_mask`
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return out if layout is None else (layout.contract(out[0], 1), None)
    root = query.shape[-1] ** 0.5
    if scaling is not None and scaling * root != 1.0:
        query = query * (scaling * root)
    heads = attention(query, key, value, ranges, dropout).transpose(1, 2)
    return (heads.contiguous() if layout is None else layout.contract(heads, 1)), None


def _default_ranges(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, is_causal: bool | None
) -> torch.Tensor:
    """Returns the key ranges that SDPA uses without a mask: all keys, or those up to the query if it is causal."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    end = torch.arange(1, queries + 1).clamp(max=keys) if causal and queries > 1 else torch.full((queries,), keys)
    return torch.stack((torch.zeros_like(end), end), dim=-1).int().expand(batch, queries, 2).contiguous()

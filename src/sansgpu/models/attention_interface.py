"""Our attention kernel inside models of transformers.

B batch, T queries, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sansgpu.kernels.attention import attention, visible_keys

NAME = "sansgpu"
_RANGES = "_sansgpu_ranges"  # of a mask: what every query sees, where that is one run of keys


def use_our_attention(model: PreTrainedModel) -> bool:
    """Have a model attend with our kernel, if transformers would take SDPA for it; returns whether it does.

    Others keep what they have: attention with a softcap or with sinks is none of SDPA's or ours.
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation != "sdpa" or getattr(config, "attn_logit_softcapping", None):
        return False
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def ranges_of(mask: torch.Tensor) -> torch.Tensor | None:
    """(B, 1, T, S) bool -> (B, T, 2) int32: first key and the one after the last; None where some lie apart."""
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    seen = mask[:, 0].int()
    count, first = seen.sum(-1), seen.argmax(-1)
    end = seen.shape[-1] - seen.flip(-1).argmax(-1)
    empty = count == 0
    if not bool(((end - first == count) | empty).all()):
        return None
    return torch.stack((first.masked_fill(empty, 0), end.masked_fill(empty, 0)), dim=-1).int()


def ranges_mask(ranges: torch.Tensor) -> torch.Tensor:
    """Hands ranges (B, T, 2) to every layer in place of a mask (B, 1, T, T), which is never made.

    transformers passes a mask of four dimensions on as it is.
    """
    mask = torch.ones(len(ranges), 1, 1, 1, dtype=torch.bool, device=ranges.device)
    setattr(mask, _RANGES, ranges)
    return mask


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """SDPA's mask, never left out, with the ranges worked out once for all layers."""
    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None
    setattr(mask, _RANGES, ranges_of(mask))
    return mask


def _attend(
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
    """query (B, H, T, d), key and value (B, K, S, d); returns (B, T, H, d)."""
    ranges = getattr(attention_mask, _RANGES, None)
    if attention_mask is None:
        ranges = _without_mask(module, query, key, is_causal)
    if query.dtype != value.dtype and torch.is_autocast_enabled(query.device.type):  # rotated in fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    more = any(kwargs.get(name) is not None for name in ("position_bias", "cache"))
    if ranges is None or not alike or more:
        if ranges is not None and attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
            attention_mask = visible_keys(ranges, key.shape[2])  # it was `ranges_mask`'s
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return out
    width = query.shape[-1] ** 0.5
    if scaling is not None and scaling * width != 1.0:
        query = query * (scaling * width)
    return attention(query, key, value, ranges, dropout).transpose(1, 2).contiguous(), None


def _without_mask(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, is_causal: bool | None
) -> torch.Tensor:
    """What SDPA does without a mask: all keys, or where the model is causal those up to the query's own place."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    end = torch.arange(1, queries + 1).clamp(max=keys) if causal and queries > 1 else torch.full((queries,), keys)
    return torch.stack((torch.zeros_like(end), end), dim=-1).int().expand(batch, queries, 2).contiguous()

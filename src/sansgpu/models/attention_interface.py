"""Runs our attention kernel in transformers models.

B batch, T queries, S keys, H query heads, K key-value heads, d head dim, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from sansgpu.kernels.attention import attention, in_window, unfused_attention, visible_keys
from sansgpu.models.packed_masks import KeyRanges, carry, packed_mask

if TYPE_CHECKING:  # transformers is optional and slow to import, so functions import it when they need it
    from transformers import PreTrainedModel


NAME = "sansgpu"


def use_our_attention(model: PreTrainedModel) -> bool:
    """Makes a model use our attention interface if it would use SDPA; returns whether our kernel now computes it.

    Attention sinks are computed with PyTorch's kernels. Models that do not use SDPA stay unchanged, except for those
    with sinks or soft caps, which SDPA does not support.
    """
    if model.config._attn_implementation != "sdpa" and not (_has_sinks(model) or _has_softcap(model)):
        return False
    _register()
    model.set_attn_implementation(NAME)
    return uses_our_attention(model)


def give_our_masks(model: nn.Module) -> None:
    """Makes transformers build our masks for a model whose attention layers call `attention_forward` themselves."""
    _register()
    cast(Any, model).config._attn_implementation = NAME


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _mask)


def uses_our_attention(model: PreTrainedModel) -> bool:
    """Returns whether our kernel computes the attention of a model."""
    return bool(model.config._attn_implementation == NAME) and not _has_sinks(model)


def _has_softcap(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))


def _has_sinks(model: PreTrainedModel) -> bool:
    """Returns True if attention scores compete with the learned scores of sinks."""
    return any("sinks" in module._parameters for module in model.modules())


def ranges_of(mask: torch.Tensor) -> torch.Tensor | None:
    """Converts a mask (B, 1, T, S) to key ranges (B, T, 2) int32; None if a query's visible keys have gaps."""
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    visible = mask[:, 0].int()
    count, first = visible.sum(-1), visible.argmax(-1)
    end = visible.shape[-1] - visible.flip(-1).argmax(-1)
    empty = count == 0
    if not bool(((end - first == count) | empty).all()):
        return None
    return torch.stack((first.masked_fill(empty, 0), end.masked_fill(empty, 0)), dim=-1).int()


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Builds SDPA's mask, even where SDPA needs none, and computes its key ranges once for all layers."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None
    if (ranges := ranges_of(mask)) is not None:
        carry(mask, KeyRanges(ranges))
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention of query (B, H, T, d) to key and value (B, K, S, d); returns (B, T, H, d).

    `s_aux` (H,) are transformers' attention sinks. With a `window`, a query attends to at most so many of the last keys
    that the mask lets it see, for models that give layers with and without a window the same mask.
    """

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor | None) -> torch.Tensor:
        if q.dtype != v.dtype and torch.is_autocast_enabled(q.device.type):  # rotary embeddings return fp32
            q, k = q.to(v.dtype), k.to(v.dtype)
        uniform = q.dtype == k.dtype == v.dtype and q.shape[-1] == v.shape[-1]
        if (s_aux is not None or window is not None) and (ranges is None or not uniform):
            raise NotImplementedError("attention sinks and windows need key ranges, and values as wide as keys")
        if ranges is not None and window is not None:
            ranges = in_window(ranges, window)
        if ranges is None or not uniform or any(kwargs.get(name) is not None for name in ("position_bias", "cache")):
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            mask = attention_mask
            if ranges is not None and mask is not None and mask.shape[-1] != k.shape[2]:
                mask = visible_keys(ranges, k.shape[2])  # attention_mask is only a stand-in
            out = sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, is_causal, **kwargs)[0]
            return out.transpose(1, 2)
        root = q.shape[-1] ** 0.5
        if scaling is not None and scaling * root != 1.0:
            q = q * (scaling * root)
        return (
            attention(q, k, v, ranges, dropout, softcap=softcap)
            if s_aux is None
            else unfused_attention(q, k, v, ranges, softcap, s_aux, dropout)
        )

    packed = packed_mask(attention_mask)
    if attention_mask is None:
        packed = KeyRanges(_default_ranges(module, query, key, is_causal))
    out = kernel(query, key, value, None) if packed is None else packed.attend(query, key, value, kernel)
    return out.transpose(1, 2).contiguous(), None


def _default_ranges(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, is_causal: bool | None
) -> torch.Tensor:
    """Returns the key ranges of SDPA without a mask: all keys or, if causal, the keys up to the query."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    end = torch.arange(1, queries + 1).clamp(max=keys) if causal and queries > 1 else torch.full((queries,), keys)
    return torch.stack((torch.zeros_like(end), end), dim=-1).int().expand(batch, queries, 2).contiguous()

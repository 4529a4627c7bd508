"""Causal attention over packed documents.

B batch, T time, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax(q k^T / sqrt(d)) v over the tokens before, of the same document. Plain, slow, of any dtype.

    q (B, H, T, d), k and v (B, K, T, d), document_ids (B, T); returns (B, H, T, d).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    time = q.shape[-2]
    visible = torch.ones(time, time, dtype=torch.bool, device=q.device).tril()
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v


def causal_document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) -> (B, 1, T, T) bool: which keys each query may see. Made once a batch, used by every layer."""
    time = document_ids.shape[1]
    causal = torch.ones(time, time, dtype=torch.bool, device=document_ids.device).tril()
    return (causal & (document_ids[:, :, None] == document_ids[:, None, :]))[:, None]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, dropout: float = 0.0
) -> torch.Tensor:
    """`reference_attention`, with the documents given as `causal_document_mask`, and dropout on the weights.

    q (B, H, T, d), k and v (B, K, T, d), mask (B, 1, T, T); returns (B, H, T, d).
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )

"""Attention in which every query sees one contiguous range of keys.

A range per query expresses causal and bidirectional attention, packed documents and padding. In graphs, a `Decay` makes
scores depend on the distance between nodes. B batch, T queries, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import constants, structs
from sansgpu.kernels.pointwise import draw_seed

# Computes attention as `attention` does, from q (B, H, T, d), k and v (B, K, S, d) and key ranges (B, T, 2).
AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BLOCK_QUERIES = 256  # queries of a block in `unfused_attention`
_ERROR_MESSAGES = {  # by the result of attention_forward, a constant of native.h
    "WRONG_KEY": "attention: a key index in `ranges` is out of bounds; use 0 to {keys}.",
    "WRONG_NODE": "attention: a node (root, slot) is out of bounds; use roots from 0 to {MAX_ROOT} and slots from 0 "
    "to {MAX_SLOT}.",
    "WRONG_DISTANCE": "attention: the distance between two nodes is out of bounds for the decay table, which has "
    "{entries} entries per head.",
}


def token_places(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the example (N,) of each token and its position (N,) in that example."""
    examples = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return examples, torch.arange(len(examples), device=lengths.device) - starts[examples]


def causal_ranges(document_ids: torch.Tensor) -> torch.Tensor:
    """Returns the key range [first, end) of each token under a causal mask: (B, T) -> (B, T, 2) int32.

    A token sees itself and the earlier tokens of its document. A document is a run of equal ids.
    """
    position, first, _ = _document_bounds(document_ids)
    return torch.stack((first, position + 1), dim=-1).int()


def bidirectional_ranges(document_ids: torch.Tensor) -> torch.Tensor:
    """Like `causal_ranges`, but a token attends to its whole document. Padding needs a document id of its own."""
    _, first, end = _document_bounds(document_ids)
    return torch.stack((first, end), dim=-1).int()


def _document_bounds(document_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns each token's position, its document's first position and its document's end, each (B, T)."""
    batch, time = document_ids.shape
    position = torch.arange(time, device=document_ids.device).expand(batch, time)
    edge = torch.ones(batch, 1, dtype=torch.bool, device=document_ids.device)
    change = document_ids[:, 1:] != document_ids[:, :-1]
    first = torch.where(torch.cat((edge, change), 1), position, 0).cummax(1).values
    end = torch.where(torch.cat((change, edge), 1), position + 1, time).flip(1).cummin(1).values.flip(1)
    return position, first, end


def in_window(ranges: torch.Tensor, window: int) -> torch.Tensor:
    """Limits causal key ranges (B, T, 2) to the last `window` keys, of which the query's own is one."""
    first, end = ranges.unbind(dim=-1)
    return torch.stack((torch.maximum(first, end - window), end), dim=-1)


def visible_keys(ranges: torch.Tensor, keys: int) -> torch.Tensor:
    """Converts key ranges (B, T, 2) to a boolean attention mask (B, 1, T, S)."""
    key = torch.arange(keys, device=ranges.device)
    return ((ranges[:, :, :1] <= key) & (key < ranges[:, :, 1:]))[:, None]


def node_distances(nodes: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the length in edges of the shortest path between each node and each of `others` (default: `nodes`).

    The nodes are those of a leafy chain graph, a chain of roots, each with a chain of leaves (GraphMERT, arXiv
    2510.09580). Edges connect consecutive roots, each root with its leaves, and consecutive leaves of a root. A root is
    the pair (root, 0) and a leaf the pair (root, 1 + slot). Paths may pass through nodes not listed.

    nodes (B, T, 2), others (B, S, 2), integers; returns (B, T, S) int64.
    """
    root, slot = nodes.long()[:, :, None].unbind(-1)
    other_root, other_slot = (nodes if others is None else others).long()[:, None].unbind(-1)
    leaves = (slot > 0).long() + (other_slot > 0).long()
    siblings = (root == other_root) & (leaves == 2)
    return torch.where(siblings, (slot - other_slot).abs().clamp(max=2), (root - other_root).abs() + leaves)


@dataclass(frozen=True)
class Decay:
    """Multiplies the score q.k / sqrt(d) of head h with table[h, distance from query to key], or adds it if `added`.

    Queries and keys are the same nodes; M distances.
    """

    nodes: torch.Tensor  # (B, T, 2) int32
    table: torch.Tensor  # (H, M) fp32, may require gradients
    added: bool = False

    def decayed(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Applies the decay to scores (B, H, T, S); those that are not visible (B, 1, T, S) become arbitrary."""
        entries = self.table[:, node_distances(self.nodes).masked_fill(~visible[:, 0], 0)].transpose(0, 1)
        return scores + entries if self.added else scores * entries


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    dropout_mask: torch.Tensor | None = None,
    decay: Decay | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes softmax(q k^T / sqrt(d)) v over the keys in range, in any dtype. Queries without keys give zeros.

    q (B, H, T, d), k and v (B, K, S, d), ranges (B, T, 2); `dropout_mask` (B, H, T, S) holds factors of the
    attention weights, 0 or 1 / (1 - dropout); `decay` or `softcap` changes scores before the softmax. Returns
    (B, H, T, d).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    visible = visible_keys(ranges, k.shape[2])
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if decay is not None:
        scores = decay.decayed(scores, visible)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1).nan_to_num().to(v.dtype) * visible
    return (weights if dropout_mask is None else weights * dropout_mask) @ v


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    dropout: float = 0.0,
    decay: Decay | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes `reference_attention` with the fastest kernel available; dropout draws from torch's generator.

    q (B, H, T, d), k and v (B, K, S, d), ranges (B, T, 2) int32; returns (B, H, T, d). With `softcap`, scores s become
    softcap * tanh(s / softcap), as in Gemma 2; it excludes `decay`. Raises IndexError if a query sees a key at a
    distance for which `decay.table` has no entry.
    """
    _require(decay is None or softcap is None, "either a decay or a soft cap")
    if library.takes(q) and q.shape[-1] % 2 == 0:
        table, nodes, added = None, None, False
        if decay is not None:  # the kernel applies it before it divides scores by sqrt(d)
            table = (decay.table.float() * (q.shape[-1] ** 0.5 if decay.added else 1.0)).contiguous()
            nodes, added = decay.nodes.contiguous(), decay.added
        options = _AttentionOptions(ranges.contiguous(), dropout, draw_seed(dropout), nodes, added, softcap or 0.0)
        return cast(torch.Tensor, _AttentionFunction.apply(q, k, v, table, options))
    if softcap is not None:
        return unfused_attention(q, k, v, ranges, softcap, dropout=dropout)
    if decay is None:
        visible, grouped = visible_keys(ranges, k.shape[2]), q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, visible, dropout, enable_gqa=grouped)
    dropout_mask = F.dropout(q.new_ones((*q.shape[:3], k.shape[2])), dropout) if dropout else None
    return reference_attention(q, k, v, ranges, dropout_mask, decay)


def unfused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Computes attention with other scores, with PyTorch's kernels.

    `softcap` is that of `attention`. With `sinks` (H,), each query also has the score of its head's sink, which has no
    value, as in gpt-oss. Takes and returns the same shapes as `attention`.

    Each block of queries is multiplied only with the keys that any of them sees, so that a long row of packed documents
    does not take memory for all pairs of its tokens.
    """
    outs, groups = [], q.shape[1] // k.shape[1]
    for start in range(0, q.shape[2], _BLOCK_QUERIES):
        queries, own = q[:, :, start : start + _BLOCK_QUERIES], ranges[:, start : start + _BLOCK_QUERIES]
        first, end = int(own[..., 0].min()), max(int(own[..., 1].max()), 1)
        keys, values = (x[:, :, first:end].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = queries @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = visible_keys(own - first, end - first)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible, float("-inf"))
        if sinks is not None:
            own_sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, own_sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : end - first]
        weights = weights.nan_to_num() * visible  # queries without keys give zeros
        outs.append(F.dropout(weights.to(v.dtype), dropout) @ values)
    return torch.cat(outs, dim=2)


class _AttentionOptions(NamedTuple):
    """The arguments of the kernel that have no gradient."""

    ranges: torch.Tensor
    dropout: float
    seed: torch.Tensor
    nodes: torch.Tensor | None
    added: bool
    softcap: float  # 0: no cap


class _AttentionFunction(torch.autograd.Function):
    """Takes and returns (B, H, T, d) tensors, because a transpose outside adds an autograd node for each tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: torch.Tensor | None,
        options: _AttentionOptions,
    ) -> torch.Tensor:
        q, k, v = (_aligned(t).transpose(1, 2) for t in (q, k, v))
        sizes = _sizes(q, k, v)
        _check(sizes, table, options)
        out, lse = q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        ranges, dropout, seed, nodes, added, softcap = options
        entries = 0 if table is None else table.shape[1]
        status = library.call(
            "attention_forward", q.dtype == torch.bfloat16, sizes, *_strided(q), *_strided(k), *_strided(v), ranges,
            dropout, seed, nodes, table, entries, added, softcap, *_strided(out), lse,
        )  # fmt: skip
        if status != constants()["ATTENTION_OK"]:
            message = next(text for name, text in _ERROR_MESSAGES.items() if constants()[name] == status)
            raise IndexError(message.format(keys=k.shape[1], entries=entries, **constants()))
        ctx.sizes, ctx.options = sizes, options
        ctx.save_for_backward(q, k, v, out, lse, table)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, table = ctx.saved_tensors
        ranges, dropout, seed, nodes, added, softcap = ctx.options
        grad_out = _aligned(grad_outputs[0].transpose(1, 2).to(q.dtype))
        grads = [torch.empty_like(t) for t in (q, k, v)]  # strided like q, k and v, so that autograd need not copy
        table_grad, entries = (None, 0) if table is None else (torch.empty_like(table), table.shape[1])
        library.call(
            "attention_backward", q.dtype == torch.bfloat16, ctx.sizes, *_strided(grad_out), *_strided(q),
            *_strided(k), *_strided(v), *_strided(out), lse, ranges, dropout, seed, nodes, table, entries, added,
            softcap, *_strided(grads[0]), *_strided(grads[1]), *_strided(grads[2]), table_grad,
        )  # fmt: skip
        return (*(grad.transpose(1, 2) for grad in grads), table_grad, None)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns x, copied unless its last dimension is contiguous and its other strides are even, as the kernel needs."""
    aligned = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return x if aligned else x.contiguous()


def _strided(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    return x, x.stride()


def _require(condition: bool, requirement: str) -> None:
    if not condition:
        raise RuntimeError(f"attention expects {requirement}.")


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Returns the struct AttentionSizes of native.h, of q (B, T, H, d), k and v (B, S, K, d)."""
    (batch, queries, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
    _require(
        k.shape == v.shape == (batch, keys, kv_heads, dim), "q of shape (B, T, H, d), and k and v of shape (B, S, K, d)"
    )
    _require(q.dtype == k.dtype == v.dtype, "q, k and v of the same dtype")
    _require(min(heads, kv_heads, dim) > 0, "at least one query head, one key-value head and one feature")
    _require(
        heads % kv_heads == 0,
        f"a number of query heads that is a multiple of that of key-value heads, got {heads} and {kv_heads}",
    )
    return structs()["AttentionSizes"](B=batch, T=queries, S=keys, H=heads, K=kv_heads, d=dim)


def _check(sizes: Any, table: torch.Tensor | None, options: _AttentionOptions) -> None:
    ranges, nodes = options.ranges, options.nodes
    fits = ranges.shape == (sizes.B, sizes.T, 2) and ranges.dtype == torch.int32 and ranges.is_contiguous()
    _require(fits, "contiguous int32 ranges (B, T, 2)")
    if table is None or nodes is None:
        return
    fits = sizes.T == sizes.S and nodes.shape == (sizes.B, sizes.T, 2) and nodes.dtype == torch.int32
    _require(fits and nodes.is_contiguous(), "contiguous int32 nodes (B, T, 2), and as many keys as queries")
    fits = table.ndim == 2 and table.shape[0] == sizes.H and table.shape[1] > 0 and table.dtype == torch.float32
    _require(fits and table.is_contiguous(), "a contiguous fp32 decay table (H, M)")

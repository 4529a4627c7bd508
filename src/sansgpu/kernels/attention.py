"""Attention in which every query sees one contiguous range of keys.

A range per query expresses causal and bidirectional attention, packed documents and padding. In graphs, a `Decay` makes
scores depend on the distance between nodes. B batch, T queries, S keys, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import native
from sansgpu.kernels.distances import Decay  # re-exported
from sansgpu.kernels.dropout import draw_seed

ROWS = 128  # queries per block in plain torch: smaller blocks skip more masked scores, larger ones make larger matmuls

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor ranges, float dropout, Tensor seed, Tensor? nodes, "
    "Tensor? table, bool added) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor ranges, "
    "float dropout, Tensor seed, Tensor? nodes, Tensor? table, bool added) -> (Tensor, Tensor, Tensor, Tensor)"
)
_WRONG = {  # by the Status of native/attention_forward.cpp
    1: "a key in `ranges` is out of range: keys lie in 0 to {keys}.",
    2: "a node (root, slot) is out of range: roots lie in 0 to 524287 and slots in 0 to 4087.",
    3: "the distance between two nodes is out of range of the decay table, which has {entries} entries per head.",
}


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


def visible_keys(ranges: torch.Tensor, keys: int) -> torch.Tensor:
    """Converts key ranges (B, T, 2) to a boolean attention mask (B, 1, T, S)."""
    key = torch.arange(keys, device=ranges.device)
    return ((ranges[:, :, :1] <= key) & (key < ranges[:, :, 1:]))[:, None]


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    dropout_mask: torch.Tensor | None = None,
    decay: Decay | None = None,
) -> torch.Tensor:
    """Computes softmax(q k^T / sqrt(d)) v over the keys in range, in any dtype. Queries without keys give zeros.

    q (B, H, T, d), k and v (B, K, S, d), ranges (B, T, 2); `dropout_mask` (B, H, T, S) holds factors of the
    attention weights, 0 or 1 / (1 - dropout); `decay` changes scores before the softmax. Returns (B, H, T, d).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    visible = visible_keys(ranges, k.shape[2])
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if decay is not None:
        scores = decay.decayed(scores, decay.entries(visible)[1])
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1).nan_to_num().to(v.dtype) * visible
    return (weights if dropout_mask is None else weights * dropout_mask) @ v


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    dropout: float = 0.0,
    decay: Decay | None = None,
) -> torch.Tensor:
    """Computes `reference_attention` with the fastest kernel available; dropout draws from torch's generator.

    q (B, H, T, d), k and v (B, K, S, d), ranges (B, T, 2) int32; returns (B, H, T, d). Raises IndexError if a query
    sees a key at a distance for which `decay.table` has no entry.
    """
    if q.device.type != "cpu":
        return _device_attention(q, k, v, ranges, dropout, decay)
    seed = draw_seed(dropout)
    if native.takes(q) and q.shape[-1] % 2 == 0:
        rest = (ranges.contiguous(), dropout, seed, *_decay_arguments(q, decay))
        if not torch.compiler.is_compiling():
            return cast(torch.Tensor, _AttentionFunction.apply(q, k, v, *rest))
        views = [_aligned(t).transpose(1, 2) for t in (q, k, v)]
        out, _ = torch.ops.sansgpu.attention_forward(*views, *rest)
        return cast(torch.Tensor, out).transpose(1, 2)
    # Only while compiling: torch.compiler.disable imports the compiler.
    blocked = torch.compiler.disable(_blocked_attention) if torch.compiler.is_compiling() else _blocked_attention
    return cast(torch.Tensor, blocked(q, k, v, ranges, dropout, seed, decay))


def _device_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, dropout: float, decay: Decay | None
) -> torch.Tensor:
    """Computes attention on devices other than the CPU: with SDPA, or with the reference if there is a decay."""
    if decay is None:
        return F.scaled_dot_product_attention(
            q, k, v, visible_keys(ranges, k.shape[2]), dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
    dropout_mask = F.dropout(q.new_ones((*q.shape[:3], k.shape[2])), dropout) if dropout else None
    return reference_attention(q, k, v, ranges, dropout_mask, decay)


def _decay_arguments(q: torch.Tensor, decay: Decay | None) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """Returns (nodes, table, added) for the C++ kernel, which applies the decay before it divides scores by sqrt(d)."""
    if decay is None:
        return None, None, False
    table = decay.table.float() * (q.shape[-1] ** 0.5 if decay.added else 1.0)
    return decay.nodes.contiguous(), table.contiguous(), decay.added


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns x, copied unless its last dimension is contiguous and its other strides are even, as the kernel needs."""
    aligned = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return x if aligned else x.contiguous()


def _require(condition: bool, requirement: str) -> None:
    if not condition:
        raise RuntimeError(f"attention requires that {requirement}.")


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """Returns B, T, S, H, K, d of q (B, T, H, d), k and v (B, S, K, d)."""
    (batch, queries, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
    _require(k.shape == v.shape == (batch, keys, kv_heads, dim), "k and v are (B, S, K, d) for a q of (B, T, H, d)")
    _require(q.dtype == k.dtype == v.dtype, "q, k and v have one dtype")
    _require(min(heads, kv_heads, dim) > 0, "there are query heads and k/v heads, and that their width is not 0")
    _require(heads % kv_heads == 0, f"{kv_heads} k/v heads divide {heads} query heads")
    return batch, queries, keys, heads, kv_heads, dim


def _strided(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    return x, x.stride()


def _check_decay(sizes: tuple[int, ...], nodes: torch.Tensor, table: torch.Tensor) -> None:
    batch, queries, keys, heads, *_ = sizes
    fits = queries == keys and nodes.shape == (batch, queries, 2) and nodes.dtype == torch.int32
    _require(fits and nodes.is_contiguous(), "nodes must be (B, T, 2) int32, and that there are T keys")
    fits = table.ndim == 2 and table.shape[0] == heads and table.shape[1] > 0 and table.dtype == torch.float32
    _require(fits and table.is_contiguous(), "the table must be (H, M) fp32")


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    dropout: float,
    seed: torch.Tensor,
    nodes: torch.Tensor | None,
    table: torch.Tensor | None,
    added: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = _sizes(q, k, v)
    fits = ranges.shape == (*q.shape[:2], 2) and ranges.dtype == torch.int32 and ranges.is_contiguous()
    _require(fits, "the ranges are (B, T, 2) int32")
    if nodes is not None and table is not None:
        _check_decay(sizes, nodes, table)
    out, lse = _forward_shapes(q, k, v)
    entries = 0 if table is None else table.shape[1]
    status = native.call(
        "attention_forward", q.dtype == torch.bfloat16, sizes, *_strided(q), *_strided(k), *_strided(v), ranges,
        dropout, seed, nodes, table, entries, added, *_strided(out), lse,
    )  # fmt: skip
    if status:
        raise IndexError(_WRONG[status].format(keys=k.shape[1], entries=entries))
    return out, lse


def _forward_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, time, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, time), dtype=torch.float32)


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ranges: torch.Tensor,
    dropout: float,
    seed: torch.Tensor,
    nodes: torch.Tensor | None,
    table: torch.Tensor | None,
    added: bool,
) -> tuple[torch.Tensor, ...]:
    sizes = _sizes(q, k, v)
    _require(grad_out.shape == out.shape == q.shape, "the output has the shape of q")
    grads = _backward_shapes(grad_out, q, k, v, table, added)
    native.call(
        "attention_backward", q.dtype == torch.bfloat16, sizes, *_strided(grad_out), *_strided(q), *_strided(k),
        *_strided(v), *_strided(out), lse, ranges, dropout, seed, nodes, table, grads[3].shape[1], added,
        *_strided(grads[0]), *_strided(grads[1]), *_strided(grads[2]), grads[3],
    )  # fmt: skip
    return grads


def _backward_shapes(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Returns memory for the gradients of q, k, v and the table, with their strides, so that autograd need not copy."""
    *_, table, _ = rest
    table_grad = q.new_empty((0, 0), dtype=torch.float32) if table is None else torch.empty_like(table)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), table_grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ranges, ctx.dropout, seed, nodes, table, ctx.added = inputs
    ctx.save_for_backward(q, k, v, *output, ranges, seed, nodes, table)


def _gradients(
    ctx: Any, grad_out: torch.Tensor, backward: Callable[..., tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, ranges, seed, nodes, table = ctx.saved_tensors
    grad_out = _aligned(grad_out.to(q.dtype))
    *grads, table_grad = backward(grad_out, q, k, v, out, lse, ranges, ctx.dropout, seed, nodes, table, ctx.added)
    return (*grads, None, None, None, None, None if table is None else table_grad, None)


class _AttentionFunction(torch.autograd.Function):
    """Calls the kernels without an operation of torch, whose dispatch takes longer than everything else here.

    Its tensors are (B, H, T, d), because transposing outside adds a step to the backward pass for each tensor.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        inputs = (*(_aligned(t).transpose(1, 2) for t in (q, k, v)), *rest)
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[0].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *rest = _gradients(ctx, grad_outputs[0].transpose(1, 2), _backward)
        return (*(None if grad is None else grad.transpose(1, 2) for grad in (q, k, v)), *rest)


torch.library.register_fake("sansgpu::attention_forward", _forward_shapes)
torch.library.register_fake("sansgpu::attention_backward", _backward_shapes)
torch.library.register_autograd(
    "sansgpu::attention_forward",
    lambda ctx, grad_out, _: _gradients(ctx, grad_out, torch.ops.sansgpu.attention_backward),
    setup_context=_setup_context,
)
_library.impl("attention_forward", _forward, "CPU")
_library.impl("attention_backward", _backward, "CPU")


def _blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    dropout: float,
    seed: torch.Tensor,
    decay: Decay | None,
) -> torch.Tensor:
    """Computes attention in plain torch, block by block, for machines without a C++ compiler.

    It is twice as fast as F.scaled_dot_product_attention, whose backward pass on a CPU also computes masked scores.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    table = None
    if decay is not None:
        table = decay.table.to(_accumulation_dtype(q))
        decay = replace(decay, table=table)
    return cast(torch.Tensor, _BlockedAttention.apply(q, k, v, ranges, dropout, seed, decay, table))


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ranges: torch.Tensor,
        dropout: float,
        seed: torch.Tensor,
        decay: Decay | None,
        table: torch.Tensor | None,  # decay.table again: autograd returns gradients of tensor arguments only
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        out = q.new_zeros(q.shape)
        blocks, saved = [], []
        for start in range(0, q.shape[2] if len(q) else 0, ROWS):
            rows = ranges[:, start : start + ROWS]
            low, high = int(rows[..., 0].min()), int(rows[..., 1].max())
            if low >= high:
                continue
            stop = start + rows.shape[1]
            visible = visible_keys(rows - low, high - low)
            scores = _scores(q[:, :, start:stop], k[:, :, low:high])
            if decay is not None:
                _, entries = decay.entries(visible, slice(start, stop), slice(low, high))
                scores = decay.decayed(scores, entries)
            weights = torch.softmax(scores.masked_fill_(~visible, float("-inf")), dim=-1).nan_to_num_().to(q.dtype)
            mask = _dropout_mask(weights, dropout, generator)
            out[:, :, start:stop] = (weights if mask is None else weights * mask) @ v[:, :, low:high]
            blocks.append((start, stop, low, high))
            saved += [weights] if mask is None else [weights, mask]
        ctx.save_for_backward(q, k, v, ranges, *saved)
        ctx.blocks, ctx.with_dropout, ctx.decay = blocks, dropout > 0, decay
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, ranges, *saved = ctx.saved_tensors
        decay: Decay | None = ctx.decay
        table_grad = None if decay is None else torch.zeros_like(decay.table)
        grad_out = grad_outputs[0].to(q.dtype)
        q_grad = torch.zeros_like(q)
        k_grad, v_grad = (torch.zeros_like(t, dtype=_accumulation_dtype(t)) for t in (k, v))
        for index, (start, stop, low, high) in enumerate(ctx.blocks):
            weights = saved[2 * index if ctx.with_dropout else index]
            mask = saved[2 * index + 1] if ctx.with_dropout else None
            grad = grad_out[:, :, start:stop]
            dropped = weights if mask is None else weights * mask
            v_grad[:, :, low:high] += dropped.transpose(-1, -2) @ grad
            weight_grad = (grad @ v[:, :, low:high].transpose(-1, -2)).to(_accumulation_dtype(q))
            if mask is not None:
                weight_grad.mul_(mask)
            product = weight_grad.mul_(weights)
            score_grad = product.sub_(product.sum(-1, keepdim=True) * weights)
            if decay is not None and table_grad is not None:
                visible = visible_keys(ranges[:, start:stop] - low, high - low)
                distances, entries = decay.entries(visible, slice(start, stop), slice(low, high))
                scores = _scores(q[:, :, start:stop], k[:, :, low:high])
                score_grad = decay.gradient(score_grad, scores, distances, entries, table_grad)
            score_grad = score_grad.mul_(q.shape[-1] ** -0.5).to(q.dtype)
            q_grad[:, :, start:stop] = score_grad @ k[:, :, low:high]
            k_grad[:, :, low:high] += score_grad.transpose(-1, -2) @ q[:, :, start:stop]
        return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype), None, None, None, None, table_grad


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).to(_accumulation_dtype(q)).mul_(q.shape[-1] ** -0.5)


def _accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _dropout_mask(weights: torch.Tensor, dropout: float, generator: torch.Generator) -> torch.Tensor | None:
    """Returns 0 or 1 / (1 - dropout) for each weight, or None without dropout."""
    if not dropout:
        return None
    draws = torch.rand(weights.shape, generator=generator)
    return (draws >= dropout).to(weights.dtype) / (1 - dropout)

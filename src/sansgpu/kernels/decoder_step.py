"""A decoder's forward pass for one new token of each of several sequences, in one call of C++.

Between two kernels that are called from Python, a step of generation would wait longer than a small model computes.
B sequences, D width, H query heads, K key-value heads, d head dim, F inner width, V vocabulary, S tokens of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from sansgpu.kernels import native
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.norm import RMSNorm

TILE = 64  # outputs of a packed tile, as in native/decoder_step.cpp
MAX_GROUP = 64  # query heads of a key-value head


@dataclass(frozen=True)
class StepLayer:
    """A block with RMSNorm before attention with rotary embedding and before SwiGLU, as in Llama, Qwen and Mistral."""

    norm: RMSNorm
    qkv: tuple[Linear, Linear, Linear]
    head_norms: tuple[RMSNorm, RMSNorm] | None  # Qwen3 normalizes queries and keys
    out: Linear
    second_norm: RMSNorm
    gate: Linear
    up: Linear
    down: Linear


def step_takes(layers: Sequence[StepLayer], last_norm: RMSNorm, head_weight: torch.Tensor, head_dim: int) -> bool:
    """Returns True if the C++ code computes these layers."""
    linears = [linear for one in layers for linear in (*one.qkv, one.out, one.gate, one.up, one.down)]
    norms = [norm for one in layers for norm in (one.norm, one.second_norm, *(one.head_norms or ()))] + [last_norm]
    weights = [head_weight, *(linear.weight for linear in linears)]
    heads, kv_heads = (layers[0].qkv[place].out_features // head_dim for place in (0, 1))
    return (
        native.takes(*weights)
        and all(weight.dtype == head_weight.dtype and weight.shape[1] % 2 == 0 for weight in weights)
        and all(weight.is_contiguous() for weight in weights)
        and all(norm.weight.dtype == torch.float32 and norm.eps == last_norm.eps for norm in norms)
        and all(linear.bias is None for one in layers for linear in (one.out, one.gate, one.up, one.down))
        and all(len({linear.bias is None for linear in one.qkv}) == 1 for one in layers)
        and head_dim % 2 == 0
        and heads <= MAX_GROUP * kv_heads
    )


class DecoderStep:
    """The layers of a decoder with packed copies of their weights, in the dtype of the head's weight (V, D)."""

    def __init__(
        self, layers: Sequence[StepLayer], last_norm: RMSNorm, head_weight: torch.Tensor, head_dim: int
    ) -> None:
        first = layers[0]
        heads, kv_heads = (first.qkv[place].out_features // head_dim for place in (0, 1))
        self._sizes = (head_weight.shape[1], heads, kv_heads, head_dim, first.gate.out_features, len(head_weight))
        self._last_norm, self._head = last_norm, _packed(head_weight)
        self._narrow = head_weight.dtype == torch.bfloat16
        self._layers = [_tensors(one) for one in layers]

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Adds a token to each sequence; returns the logits (B, V) of the next tokens.

        x (B, D) are the tokens' embeddings, cos and sin (B, d) their rotary angles, `positions` (B,) int64 their places
        in the caches: contiguous keys and values (B or more, K, S, d) of each layer.
        """
        width, *rest = self._sizes
        count, capacity = len(positions), caches[0][0].shape[2]
        x, cos, sin = (values.float().contiguous().view(count, -1) for values in (x.clone(), cos, sin))
        if int(positions.max()) >= capacity or x.shape[1] != width or cos.shape[1] != rest[2]:
            raise ValueError(f"a step of {tuple(x.shape)} does not fit caches of {capacity} tokens.")
        pointers = (
            [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *cache)]
            for tensors, cache in zip(self._layers, caches, strict=True)
        )
        logits = self._head.new_empty(count, rest[-1])
        native.call(
            "decoder_step", self._narrow, (count, width, *rest, capacity, len(self._layers)),
            float(self._last_norm.eps), tuple(chain.from_iterable(pointers)), self._last_norm.weight, self._head,
            x, cos, sin, positions.contiguous(), logits,
        )  # fmt: skip
        return logits


def _tensors(layer: StepLayer) -> tuple[torch.Tensor | None, ...]:
    """Returns the first tensors of the struct Layer of native/decoder_step.cpp."""
    biases = [linear.bias for linear in layer.qkv]
    bias = None if biases[0] is None else torch.cat([bias.detach().float() for bias in biases])
    q_norm, k_norm = (norm.weight for norm in layer.head_norms) if layer.head_norms else (None, None)
    return (
        layer.norm.weight, _packed(torch.cat([linear.weight.detach() for linear in layer.qkv])), bias, q_norm, k_norm,
        _packed(layer.out.weight), layer.second_norm.weight, _packed(layer.gate.weight, layer.up.weight),
        _packed(layer.down.weight),
    )  # fmt: skip


def _packed(*weights: torch.Tensor) -> torch.Tensor:
    """Returns weights of one shape, packed in tiles that take turns."""
    rows, terms = weights[0].shape
    tile = TILE * terms
    packed = weights[0].new_empty(-(-rows // TILE) * len(weights) * tile, requires_grad=False)
    for place, weight in enumerate(weights):
        narrow = weight.dtype == torch.bfloat16
        native.call("pack_step_weight", narrow, weight.detach(), rows, terms, len(weights), packed[place * tile :])
    return packed

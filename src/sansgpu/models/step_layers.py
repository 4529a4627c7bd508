"""Finds decoders whose steps of generation one call of C++ computes; others run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sansgpu.kernels.activation import Kind
from sansgpu.kernels.decoder_step import DecoderStep, StepLayer, step_takes
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.norm import RMSNorm
from sansgpu.machine.probe import available_memory
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.fused_layers import PreNormLayer, SwiGLU
from sansgpu.models.modules import blocks_of
from sansgpu.models.rotary_attention import NORMS, PROJECTIONS, RotaryAttention

PACKED_RATIO = 0.25  # the share of the available memory that copies of the weights may take


def decoder_step(model: TransformerLM) -> DecoderStep | None:
    """Returns the steps of our decoder with RMSNorm, rotary embedding and SwiGLU; None for other architectures."""
    blocks: list[Any] = list(model.blocks)
    if model.config.decoder.positions != "rope" or blocks[0].feed_forward.kind is not Kind.SWIGLU:
        return None
    layers = [
        _layer(
            block.attention_norm,
            [getattr(block.attention, name) for name in "qkvo"],
            [block.attention.q_norm, block.attention.k_norm],
            block.feed_forward_norm,
            [block.feed_forward.gate, block.feed_forward.up, block.feed_forward.down],
        )
        for block in blocks
    ]
    return _step(layers, model.norm, model.head_weight, model.config.head_dim)


def pretrained_step(model: Any) -> DecoderStep | None:
    """Returns the steps of a transformers model whose blocks use our kernels; None for other architectures."""
    blocks: list[Any] = blocks_of(model)
    head, last_norm = model.get_output_embeddings(), getattr(model.base_model, "norm", None)
    if not blocks or not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        return None
    layers = []
    for block in blocks:
        if not isinstance(block, PreNormLayer):
            return None
        attention: Any = block.self_attn
        mlp: Any = block.mlp
        if not (isinstance(attention, RotaryAttention) and isinstance(mlp, SwiGLU)):
            return None
        if attention.scaling * attention.head_dim**0.5 != 1.0:
            return None
        parts = [getattr(attention, name) for name in PROJECTIONS], [getattr(attention, name, None) for name in NORMS]
        feed_forward = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        layers.append(_layer(block.input_layernorm, *parts, block.post_attention_layernorm, feed_forward))
    return _step(layers, last_norm, head.weight, blocks[0].self_attn.head_dim)


def _layer(
    norm: Any, attention: Sequence[Any], head_norms: Sequence[Any], second_norm: Any, feed_forward: Sequence[Any]
) -> StepLayer | None:
    """Returns a layer, or None unless all of its parts are those that the C++ code computes."""
    # Adapters and quantized layers are subclasses, or hold a Linear.
    plain = all(type(linear) is Linear for linear in (*attention, *feed_forward))
    normed = [one for one in head_norms if one is not None]
    if not plain or not all(isinstance(one, RMSNorm) for one in (norm, second_norm, *normed)):
        return None
    q, k, v, out = attention
    pair = (normed[0], normed[1]) if len(normed) == len(NORMS) else None
    return StepLayer(norm, (q, k, v), pair, out, second_norm, *feed_forward)


def _step(
    layers: Sequence[StepLayer | None], last_norm: Any, head_weight: torch.Tensor, head_dim: int
) -> DecoderStep | None:
    found = [layer for layer in layers if layer is not None]
    if len(found) < len(layers) or not isinstance(last_norm, RMSNorm):
        return None
    linears = [linear for one in found for linear in (*one.qkv, one.out, one.gate, one.up, one.down)]
    size = head_weight.nbytes + sum(linear.weight.nbytes for linear in linears)
    if not step_takes(found, last_norm, head_weight, head_dim):
        return None
    if size > PACKED_RATIO * available_memory(torch.device("cpu")):
        return None
    return DecoderStep(found, last_norm, head_weight, head_dim)

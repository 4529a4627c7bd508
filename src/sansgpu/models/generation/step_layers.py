"""Finds decoders whose steps of generation one call of C++ computes; others run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sansgpu.kernels.activation import Kind
from sansgpu.kernels.decoder_step import DecoderStep, StepLayer, StepWeight, step_takes
from sansgpu.kernels.linear import Linear, autocast_dtype
from sansgpu.kernels.norm import RMSNorm
from sansgpu.machine.probe import available_memory
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.huggingface.fused_layers import PreNormLayer, SwiGLU
from sansgpu.models.huggingface.probes import autocast_of
from sansgpu.models.huggingface.quantized_layers import QuantizedLinear, matrix_of
from sansgpu.models.huggingface.rotary_attention import NORMS, PROJECTIONS, RotaryAttention
from sansgpu.models.modules import blocks_of

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
    head = model.head_matrix
    return _step(layers, model.norm, StepWeight(head), model.config.head_dim, model.dtype)


def pretrained_step(model: Any) -> DecoderStep | None:
    """Returns the steps of a transformers model whose blocks use our kernels; None for other architectures."""
    blocks: list[Any] = blocks_of(model)
    head, last_norm = _weight(model.get_output_embeddings()), getattr(model.base_model, "norm", None)
    if not blocks or head is None:
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
    with autocast_of(model):
        dtype = autocast_dtype(torch.empty(0)) or torch.float32
    return _step(layers, last_norm, head, blocks[0].self_attn.head_dim, dtype)


def _layer(
    norm: Any, attention: Sequence[Any], head_norms: Sequence[Any], second_norm: Any, feed_forward: Sequence[Any]
) -> StepLayer | None:
    """Returns a layer, or None unless all of its parts are those that the C++ code computes."""
    weights = [weight for weight in map(_weight, (*attention, *feed_forward)) if weight is not None]
    normed = [one for one in head_norms if one is not None]
    known = len(weights) == len(attention) + len(feed_forward)
    if not known or not all(isinstance(one, RMSNorm) for one in (norm, second_norm, *normed)):
        return None
    q, k, v, out, gate, up, down = weights
    pair = (normed[0], normed[1]) if len(normed) == len(NORMS) else None
    return StepLayer(norm, (q, k, v), pair, out, second_norm, gate, up, down)


def _weight(layer: Any) -> StepWeight | None:
    """Returns the parameters of a linear layer, or None if it computes something else."""
    if type(layer) in (Linear, nn.Linear, QuantizedLinear):
        return StepWeight(matrix_of(layer), layer.bias)
    if not hasattr(layer, "lora_A"):
        return None
    from sansgpu.models.huggingface.lora import LoraLinear  # imports peft, which takes a second

    adapter = layer.single_adapter() if isinstance(layer, LoraLinear) else None
    base = _weight(layer.base_layer)
    return None if adapter is None or base is None else replace(base, adapter=adapter)


def _step(
    layers: Sequence[StepLayer | None], last_norm: Any, head: StepWeight, head_dim: int, dtype: torch.dtype
) -> DecoderStep | None:
    found = [layer for layer in layers if layer is not None]
    if len(found) < len(layers) or not isinstance(last_norm, RMSNorm):
        return None
    if not step_takes(found, last_norm, head, head_dim, dtype):
        return None
    weights = [head, *(weight for one in found for weight in one.weights)]
    size = sum(weight.matrix.nbytes for weight in weights if isinstance(weight.matrix, torch.Tensor))
    if size > PACKED_RATIO * available_memory(torch.device("cpu")):
        return None
    return DecoderStep(found, last_norm, head, head_dim, dtype)

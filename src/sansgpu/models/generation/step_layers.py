"""Finds decoders whose steps of generation one call of C++ computes; others run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sansgpu.kernels.decoder_step import DecoderStep, StepLayer, StepWeight, step_takes
from sansgpu.kernels.norm import RMSNorm
from sansgpu.kernels.pointwise import Activation
from sansgpu.machine.probe import available_memory
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.quantized_layers import matrix_of

PACKED_RATIO = 0.25  # the share of the available memory that copies of the weights may take


def decoder_step(model: TransformerLM) -> DecoderStep | None:
    """Returns the steps of our decoder with RMSNorm, rotary embedding and SwiGLU; None for other architectures."""
    blocks: list[Any] = list(model.blocks)
    if model.config.decoder.positions != "rope" or blocks[0].feed_forward.activation is not Activation.SWIGLU:
        return None
    layers = []
    for block in blocks:
        attention, mlp = block.attention, block.feed_forward
        linears = attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down
        weights = [StepWeight(matrix_of(linear), linear.bias) for linear in linears]
        head_norms = [attention.q_norm, attention.k_norm]
        layers.append(step_layer(block.attention_norm, block.feed_forward_norm, head_norms, weights))
    head = StepWeight(model.head_matrix)
    return step_of(layers, model.norm, head, model.config.head_dim, model.dtype)


def step_layer(
    norm: Any, second_norm: Any, head_norms: Sequence[Any], weights: Sequence[StepWeight | None]
) -> StepLayer | None:
    """Returns a layer, or None unless all of its parts are those that the C++ code computes.

    `head_norms` are those of queries and keys, each None if there is none. `weights` are those of queries, keys,
    values, the output of attention, the gate, and the projections up and down.
    """
    known = [weight for weight in weights if weight is not None]
    normed = [one for one in head_norms if one is not None]
    if len(known) < len(weights) or not all(isinstance(one, RMSNorm) for one in (norm, second_norm, *normed)):
        return None
    q, k, v, out, gate, up, down = known
    pair = (normed[0], normed[1]) if len(normed) == 2 else None
    return StepLayer(norm, (q, k, v), pair, out, second_norm, gate, up, down)


def step_of(
    layers: Sequence[StepLayer | None], last_norm: Any, head: StepWeight, head_dim: int, dtype: torch.dtype
) -> DecoderStep | None:
    """Returns the steps of these layers; None if the C++ code does not compute them, or their copies are too large."""
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

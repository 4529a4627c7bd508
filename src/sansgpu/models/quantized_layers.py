"""Layers of a frozen base model whose weights stay quantized in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight, dequantize_rows
from sansgpu.kernels.frozen_linear import quantized_linear
from sansgpu.kernels.linear import Linear, autocasted
from sansgpu.models.modules import blocks_of


class QuantizedLayer(nn.Module):
    """A layer whose `weight` is None, because its values are in `blocks` (outputs, inputs)."""

    blocks: QuantizedWeight

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """The quantized rows. peft calls `dequantize` of layers with an attribute of this name, which is HQQ's."""
        return self.blocks.data

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the weight (outputs, inputs)."""
        return self.blocks.dequantized(dtype)


class QuantizedLinear(QuantizedLayer, Linear):
    """A linear layer: (..., inputs) -> (..., outputs). Its bias is a parameter."""

    transposed: bool  # True if it replaces a Conv1D of transformers, whose weight is (inputs, outputs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = autocasted(input)
        y = quantized_linear(x.reshape(-1, self.in_features), self.blocks, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


class QuantizedEmbedding(QuantizedLayer, nn.Embedding):
    """A token embedding, which widens the rows that it looks up to fp32: (...,) -> (..., inputs)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = dequantize_rows(self.blocks.data[input.flatten()], self.blocks.format)
        return rows.view(*input.shape, self.embedding_dim)


def matrix_of(layer: nn.Linear | nn.Embedding) -> Matrix:
    """Returns the weight of a layer, which may be quantized."""
    return layer.blocks if isinstance(layer, QuantizedLayer) else layer.weight


def is_transposed(layer: nn.Module) -> bool:
    """Returns True for transformers' Conv1D, a linear layer whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "weight", None), nn.Parameter)


@dataclass(frozen=True)
class QuantizableMatrix:
    """A matrix of a model that may stay quantized, and the layers that share it."""

    layers: tuple[nn.Module, ...]
    is_table: bool  # it is the token embedding or the output head

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        first, second = cast(Any, self.layers[0]).weight.shape
        return (int(second), int(first)) if is_transposed(self.layers[0]) else (int(first), int(second))

    def quantize(self, weight: QuantizedWeight) -> None:
        """Makes the layers use a quantized weight, in place."""
        for layer in self.layers:
            changed = cast(Any, layer)
            if isinstance(layer, nn.Embedding):
                changed.__class__ = QuantizedEmbedding
            else:
                changed.transposed = is_transposed(layer)
                changed.in_features, changed.out_features = weight.inputs, weight.outputs
                changed.__class__ = QuantizedLinear
            changed.weight, changed.blocks = None, weight


def quantizable_matrices(model: nn.Module) -> dict[int, QuantizableMatrix]:
    """Returns the matrices of the blocks of a model, its token embedding and its output head by their identities.

    An embedding or a head of another class than that of torch may compute more than a lookup or a product, so it is
    not among them, nor is a matrix that it shares.
    """
    found: dict[int, QuantizableMatrix] = {}
    for block in blocks_of(model):
        for layer in block.modules():
            if type(layer) is nn.Linear or is_transposed(layer):
                found[id(layer.weight)] = QuantizableMatrix((layer,), is_table=False)
    for get_table in ("get_input_embeddings", "get_output_embeddings"):
        table = getattr(model, get_table)()
        weight = getattr(table, "weight", None)
        users = tuple(m for m in model.modules() if weight is not None and getattr(m, "weight", None) is weight)
        if users and all(type(user) in (nn.Embedding, nn.Linear) for user in users):
            found[id(weight)] = QuantizableMatrix(users, is_table=True)
    return found


def dequantize_layer(layer: QuantizedLayer, weight: nn.Parameter) -> None:
    """Turns a layer with a quantized weight into a plain one with `weight` (outputs, inputs), in place."""
    changed = cast(Any, layer)
    changed.weight = weight
    del changed.blocks
    changed.__class__ = nn.Embedding if isinstance(layer, nn.Embedding) else Linear


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Turns all layers with quantized weights into plain ones, in place. Shared weights stay shared."""
    shared: dict[int, nn.Parameter] = {}
    for layer in [module for module in model.modules() if isinstance(module, QuantizedLayer)]:
        key = layer.blocks.data.data_ptr()
        if key not in shared:
            shared[key] = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
        dequantize_layer(layer, shared[key])


def restore_conv1d(layer: nn.Module) -> None:
    """Turns a layer that was a Conv1D of transformers before it was quantized into one again, in place."""
    from transformers.pytorch_utils import Conv1D

    changed = cast(Any, layer)
    changed.nx, changed.nf = changed.in_features, changed.out_features
    changed.weight = nn.Parameter(changed.weight.T.contiguous(), requires_grad=False)
    changed.__class__ = Conv1D

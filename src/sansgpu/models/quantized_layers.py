"""Layers of a frozen base model whose weights stay quantized in memory."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels import library
from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight, dequantize_rows
from sansgpu.kernels.frozen_linear import PackedCodes, bytes_of_codes, code_linear, memory_for_copies, quantized_linear
from sansgpu.kernels.linear import Linear, autocasted
from sansgpu.models.modules import Table, blocks_of


class QuantizedLayer(nn.Module):
    """A layer whose quantized weight (outputs, inputs) is in `blocks`; its `weight` is None."""

    blocks: QuantizedWeight

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """The quantized rows. HQQ layers have an attribute of this name, by which peft finds `dequantize`."""
        return self.blocks.data

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the dequantized weight (outputs, inputs)."""
        return self.blocks.dequantized(dtype)


class QuantizedLinear(QuantizedLayer, Linear):
    """A linear layer with a quantized weight: (..., inputs) -> (..., outputs). Its bias is an ordinary parameter."""

    transposed: bool  # True if it replaces transformers' Conv1D, whose weight is (inputs, outputs)
    codes: torch.Tensor | None = None  # a packed copy of the weight, for use without gradients

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = autocasted(input)
        rows = x.reshape(-1, self.in_features)
        if self.codes is not None and self.multiplies_codes(rows):
            y = code_linear(rows, self.blocks, self.codes, self.bias, self.integer)
        else:
            y = quantized_linear(rows, self.blocks, self.bias, self.integer)
        return y.view(*x.shape[:-1], self.out_features)

    def multiplies_codes(self, x: torch.Tensor) -> bool:
        """Returns whether the layer multiplies x with the packed codes of its weight."""
        return self.codes is not None and library.takes(x) and not torch.is_grad_enabled()


class QuantizedEmbedding(QuantizedLayer, nn.Embedding):
    """A quantized token embedding, which dequantizes the rows that it looks up to fp32: (...,) -> (..., inputs)."""

    scale: float = 1.0  # multiplies the rows, as in Gemma
    plain_class: type[nn.Embedding] = nn.Embedding  # the layer's class before it was quantized

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = dequantize_rows(self.blocks.data[input.flatten()], self.blocks.format)
        scaled = rows if self.scale == 1.0 else rows.mul_(self.scale)
        return scaled.view(*input.shape, self.embedding_dim)


def pack_codes(model: nn.Module, may_fill_memory: bool = False) -> None:
    """Gives the quantized linear layers of a model packed copies of their weights, if enough memory is available.

    With `may_fill_memory`, any size is allowed.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    shared = {layer.blocks.data.data_ptr(): layer.blocks for layer in layers}
    weights = list(shared.values())
    if not layers or not library.available() or bytes_of_codes(weights) > memory_for_copies(may_fill_memory):
        return
    packed = PackedCodes(weights)
    copies = {key: packed.pack(weight) for key, weight in shared.items()}
    for layer in layers:
        layer.codes = copies[layer.blocks.data.data_ptr()]


def has_only_codes(model: nn.Module) -> bool:
    """Returns whether a model multiplies only packed codes, so that a row of its layers does not depend on others."""
    modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    layers = [module for module in modules if isinstance(module, QuantizedLinear)]
    matrices = (weight for module in modules for weight in module.parameters(recurse=False) if weight.ndim > 1)
    return bool(layers) and all(layer.codes is not None for layer in layers) and not any(True for _ in matrices)


def matrix_of(layer: nn.Linear | nn.Embedding) -> Matrix:
    """Returns the weight of a layer, which may be quantized."""
    return layer.blocks if isinstance(layer, QuantizedLayer) else layer.weight


def is_linear(layer: Any) -> bool:
    """Returns True for nn.Linear and Falcon's class, which computes the same with other functions."""
    return type(layer) is nn.Linear or type(layer).__name__ == "FalconLinear"


def embedding_scale(layer: Any) -> float | None:
    """Returns the factor of the rows that an embedding looks up; None if it may compute something else.

    transformers has a class ...ScaledWordEmbedding in each family that scales its embedding.
    """
    if type(layer) in (nn.Embedding, Table):
        return 1.0
    if not (isinstance(layer, nn.Embedding) and type(layer).__name__.endswith("ScaledWordEmbedding")):
        return None
    scale = getattr(layer, "scalar_embed_scale", getattr(layer, "embed_scale", None))
    return float(scale) if isinstance(scale, (int, float)) else None


def is_transposed(layer: nn.Module) -> bool:
    """Returns True for transformers' Conv1D, a linear layer whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "weight", None), nn.Parameter)


@dataclass(frozen=True)
class QuantizableMatrix:
    """A matrix that can be quantized, with all layers that share it."""

    layers: tuple[nn.Module, ...]
    is_table: bool  # True for the token embedding and the output head

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        first, second = cast(Any, self.layers[0]).weight.shape
        return (int(second), int(first)) if is_transposed(self.layers[0]) else (int(first), int(second))

    def quantize(self, weight: QuantizedWeight) -> None:
        """Replaces the matrix with a quantized weight, in place."""
        for layer in self.layers:
            changed = cast(Any, layer)
            if isinstance(layer, nn.Embedding):
                changed.scale, changed.plain_class = embedding_scale(layer), type(layer)
                changed.__class__ = QuantizedEmbedding
            else:
                changed.transposed = is_transposed(layer)
                changed.in_features, changed.out_features = weight.inputs, weight.outputs
                changed.__class__ = QuantizedLinear
            changed.weight, changed.blocks = None, weight


def quantizable_matrices(model: nn.Module) -> dict[int, QuantizableMatrix]:
    """Returns the matrices of the blocks, the token embedding and the output head, by the id() of their parameter.

    Omits an embedding that may compute more than a lookup and a factor, a head that is not exactly nn.Linear, and a
    matrix that it shares. Omits them, too, if the model's code reads a weight, as Mamba's does.
    """
    found: dict[int, QuantizableMatrix] = {}
    for block in blocks_of(model):
        for layer in block.modules():
            if is_linear(layer) or is_transposed(layer):
                found[id(layer.weight)] = QuantizableMatrix((layer,), is_table=False)
    code = inspect.unwrap(type(model).forward).__code__
    for get_table in () if "weight" in code.co_names else ("get_input_embeddings", "get_output_embeddings"):
        table = getattr(model, get_table)()
        weight = getattr(table, "weight", None)
        users = tuple(m for m in model.modules() if weight is not None and getattr(m, "weight", None) is weight)
        if users and all(type(user) is nn.Linear or embedding_scale(user) is not None for user in users):
            found[id(weight)] = QuantizableMatrix(users, is_table=True)
    return found


def dequantize_layer(layer: QuantizedLayer, weight: nn.Parameter) -> None:
    """Turns a quantized layer into a plain one with `weight` (outputs, inputs), in place."""
    changed = cast(Any, layer)
    changed.weight = weight
    del changed.blocks
    changed.__class__ = layer.plain_class if isinstance(layer, QuantizedEmbedding) else Linear


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Turns all quantized layers into plain ones, in place. Shared weights stay shared."""
    shared: dict[int, nn.Parameter] = {}
    for layer in [module for module in model.modules() if isinstance(module, QuantizedLayer)]:
        key = layer.blocks.data.data_ptr()
        if key not in shared:
            shared[key] = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
        dequantize_layer(layer, shared[key])


def restore_conv1d(layer: nn.Module) -> None:
    """Turns a linear layer back into transformers' Conv1D, which it was before it was quantized, in place."""
    from transformers.pytorch_utils import Conv1D

    changed = cast(Any, layer)
    changed.nx, changed.nf = changed.in_features, changed.out_features
    changed.weight = nn.Parameter(changed.weight.T.contiguous(), requires_grad=False)
    changed.__class__ = Conv1D

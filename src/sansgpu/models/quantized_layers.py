"""Linear layers of a frozen base model whose weights stay quantized in memory."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.block_quantization import QuantizedWeight
from sansgpu.kernels.linear import Linear, autocasted
from sansgpu.kernels.quantized_linear import quantized_linear
from sansgpu.models.modules import blocks_of


class QuantizedLinear(Linear):
    """A linear layer whose `weight` is None: (..., inputs) -> (..., outputs). Its bias is a parameter."""

    blocks: QuantizedWeight
    transposed: bool  # True if it replaces a Conv1D of transformers, whose weight is (inputs, outputs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = autocasted(input)
        y = quantized_linear(x.reshape(-1, self.in_features), self.blocks, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """The quantized rows. peft calls `dequantize` of layers with an attribute of this name, which is HQQ's."""
        return self.blocks.data

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the weight (outputs, inputs)."""
        return self.blocks.dequantized(dtype)


def is_transposed(layer: nn.Module) -> bool:
    """Returns True for transformers' Conv1D, a linear layer whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "weight", None), nn.Parameter)


def matrix_shape(layer: nn.Module) -> tuple[int, int]:
    """Returns (outputs, inputs) of a linear layer."""
    first, second = cast(Any, layer).weight.shape
    return (int(second), int(first)) if is_transposed(layer) else (int(first), int(second))


def quantizable_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Returns the linear layers in the blocks of a model by the identity of their weights."""
    layers: dict[int, nn.Module] = {}
    for block in blocks_of(model):
        for layer in block.modules():
            if type(layer) is nn.Linear or is_transposed(layer):
                layers[id(layer.weight)] = layer
    return layers


def quantize_layer(layer: nn.Module, weight: QuantizedWeight) -> None:
    """Turns a linear layer into one with a quantized weight, in place."""
    changed = cast(Any, layer)
    changed.transposed = is_transposed(layer)
    changed.weight = None
    changed.in_features, changed.out_features, changed.blocks = weight.inputs, weight.outputs, weight
    changed.__class__ = QuantizedLinear


def dequantize_layer(layer: QuantizedLinear, weight: torch.Tensor) -> None:
    """Turns a layer with a quantized weight into a plain one with `weight` (outputs, inputs), in place."""
    changed = cast(Any, layer)
    changed.weight = nn.Parameter(weight, requires_grad=False)
    del changed.blocks
    changed.__class__ = Linear


def restore_conv1d(layer: nn.Module) -> None:
    """Turns a layer that was a Conv1D of transformers before it was quantized into one again, in place."""
    from transformers.pytorch_utils import Conv1D

    changed = cast(Any, layer)
    changed.nx, changed.nf = changed.in_features, changed.out_features
    changed.weight = nn.Parameter(changed.weight.T.contiguous(), requires_grad=False)
    changed.__class__ = Conv1D

"""Replaces layers of a transformers model with our kernels that compute the same."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from sansgpu.kernels.dropout import dropout
from sansgpu.kernels.embedding import embed
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.norm import LayerNorm
from sansgpu.models.attention_interface import use_our_attention
from sansgpu.models.encoder_layers import fuse_encoder_layers
from sansgpu.models.fused_layers import fuse_layers
from sansgpu.models.rotary_attention import fuse_rotary_attention


class Embedding(nn.Embedding):
    """nn.Embedding with fp32 outputs and gradients summed in fp32, for any dtype of the table."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return embed(input, self.weight, sparse=True)


class Dropout(nn.Dropout):
    """nn.Dropout in one pass over memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dropout(input, self.p, self.training)


def patch_layers(model: nn.Module) -> None:
    """Makes the Linear, Dropout, LayerNorm and Embedding layers of a model use our kernels."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif type(module) is nn.Dropout:
            module.__class__ = Dropout
        elif type(module) is nn.LayerNorm:
            module.__class__ = LayerNorm
        elif type(module) is nn.Embedding and module.max_norm is None and not module.sparse:
            module.__class__ = Embedding


def patch_model(model: PreTrainedModel) -> list[str]:
    """Patches a model in place; returns descriptions of the parts that do not use our kernels."""
    unpatched = [] if use_our_attention(model) else ["attention"]
    patch_layers(model)
    fuse_layers(model)
    fuse_rotary_attention(model)
    fuse_encoder_layers(model)
    others = {type(m).__name__: None for m in model.modules() if type(m).__name__ == "Conv1D"}
    return unpatched + [f"layers of type {name}" for name in others]

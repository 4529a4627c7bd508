"""Replaces the attention layers of Llama, Qwen and Mistral by ones with our rotary embedding.

They are recognized by the names of their parts, and replaced only if a trial shows that they compute what ours do.

B batch, T time, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.norm import RMSNorm
from sansgpu.kernels.rotary import rotate_heads
from sansgpu.models.huggingface.attention_interface import NAME, attention_forward
from sansgpu.models.huggingface.fused_layers import LinearPart, agree, random_tensor, with_forward

PROJECTIONS, NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")


class RotaryAttention:
    """Attention with rotary embedding, after RMSNorm of each head in Qwen3."""

    head_dim: int
    scaling: float
    attention_dropout: float
    training: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        module = cast(Any, self)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (getattr(module, name)(hidden_states).view(shape) for name in PROJECTIONS[:3])
        cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
        q, k = rotate_heads(q, k, cos, sin, *(getattr(module, name, None) for name in NORMS))
        v, dropout = v.transpose(1, 2), self.attention_dropout if self.training else 0.0
        if past_key_values is not None:  # while it generates
            k, v = past_key_values.update(k, v, module.layer_idx)
        out, _ = attention_forward(module, q, k, v, attention_mask, dropout, self.scaling, **kwargs)
        return module.o_proj(out.flatten(2)), None


def fuse_rotary_attention(model: nn.Module) -> None:
    """Makes the attention layers of a model, which uses our attention kernel, embed positions with ours, in place."""
    for module in model.modules():
        if _is_rotary_attention(module):
            module.__class__ = with_forward(RotaryAttention, type(module))


def _is_rotary_attention(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != NAME or module._parameters:
        return False
    norms = [module._modules[name] for name in NORMS if name in module._modules]
    if set(module._modules) - set(NORMS) != set(PROJECTIONS) or not all(isinstance(norm, RMSNorm) for norm in norms):
        return False
    trial = cast(Any, copy.copy(module))
    trial._modules, trial.training = _stubs(trial, norms), False
    half = random_tensor(1, 5, trial.head_dim // 2)
    angles = torch.cat((half, half), dim=-1)
    x, rotation = random_tensor(1, 5, 8), (angles.cos(), angles.sin())
    ours = RotaryAttention.forward
    return agree(lambda: trial.forward(x, rotation, None)[0], lambda: ours(trial, x, rotation, None)[0])


def _stubs(module: Any, norms: list[Any]) -> dict[str, nn.Module]:
    """Returns small parts for a trial of an attention layer with one key-value head."""
    queries, dim = module.num_key_value_groups * module.head_dim, module.head_dim
    sizes = {"q_proj": (8, queries), "k_proj": (8, dim), "v_proj": (8, dim), "o_proj": (queries, 8)}
    parts: dict[str, nn.Module] = {name: LinearPart(*size, place) for place, (name, size) in enumerate(sizes.items())}
    for name, norm in zip(NORMS, norms, strict=False):
        parts[name] = RMSNorm(dim, norm.eps)
    return parts

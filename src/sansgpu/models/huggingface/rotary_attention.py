"""Replaces the attention layers of Llama, Qwen and Mistral with ones that use our rotary embedding.

Layers are recognized by the names of their submodules, and replaced only if a trial shows that ours compute the same.

B batch, T time, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.norm import RMSNorm
from sansgpu.kernels.rotary import rotate_heads
from sansgpu.models.attention_interface import NAME, attention_forward
from sansgpu.models.layer_trials import LinearPart, agree, random_tensor, tried, with_forward


class LengthDependentRotary:
    """The rotary embeddings of a model whose frequencies depend on the sequence length. False if there are none."""

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = [
            m for m in model.modules() if hasattr(m, "rope_type") and hasattr(m, "original_max_seq_len")
        ]
        scaled = [(module, name, form) for module in modules for name, form in _rope_types(module)]
        self._dynamic = [(module, name) for module, name, form in scaled if "dynamic" in form]
        self._growing = [int(module.original_max_seq_len) for module, _ in self._dynamic]
        self._switching = [_trained_length(module, name) for module, name, form in scaled if form == "longrope"]

    def __bool__(self) -> bool:
        return bool(self._growing or self._switching)

    @property
    def unscaled(self) -> int | None:
        """The number of tokens up to which the frequencies do not depend on the length; None if they never do."""
        return min(self._growing + self._switching, default=None)

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Groups the indices of examples with the same frequencies, which can share a forward pass."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, length in enumerate(lengths):
            grown, switched = (max(length, limit) for limit in self._growing), (length > n for n in self._switching)
            groups.setdefault((*grown, *switched), []).append(index)
        return list(groups.values())

    def reset(self) -> None:
        """Resets dynamic scaling, which would otherwise keep the frequencies of the longest sequence so far."""
        for module, name in self._dynamic:
            cached = f"{name}_max_seq_len_cached" if name else "max_seq_len_cached"
            setattr(module, cached, module.original_max_seq_len)
            prefix = f"{name}_" if name else ""
            original = getattr(module, f"{prefix}original_inv_freq")
            current = getattr(module, f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original.to(current.device), persistent=False)


def _rope_types(module: Any) -> Iterator[tuple[str | None, str]]:
    """Yields (layer type, RoPE type); the layer type is None if all layers share one RoPE type."""
    if isinstance(module.rope_type, dict):
        yield from module.rope_type.items()
    else:
        yield None, str(module.rope_type)


def _trained_length(module: Any, layer_type: str | None) -> int:
    parameters = module.config.rope_parameters
    return int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])


PROJECTIONS, NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")


class RotaryAttention:
    """Mixin for attention with rotary embedding and, as in Qwen3, an RMSNorm of each head before it."""

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
        if past_key_values is not None:  # during generation
            k, v = past_key_values.update(k, v, module.layer_idx)
        out, _ = attention_forward(module, q, k, v, attention_mask, dropout, self.scaling, **kwargs)
        return module.o_proj(out.flatten(2)), None


def fuse_rotary_attention(model: nn.Module) -> None:
    """Makes attention layers that use our attention kernel use our rotary embedding, too, in place.

    Ours rotates whole heads, so layers that rotate only a part of each head keep their own.
    """
    rotated = {2 * buffer.shape[-1] for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for module in model.modules():
        if tried(_is_rotary_attention, module) and rotated <= {cast(Any, module).head_dim}:
            module.__class__ = with_forward(RotaryAttention, type(module))


def _is_rotary_attention(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != NAME or module._parameters:
        return False
    norms: list[Any] = [module._modules[name] for name in NORMS if name in module._modules]
    if set(module._modules) - set(NORMS) != set(PROJECTIONS) or not all(isinstance(norm, RMSNorm) for norm in norms):
        return False
    if any(norm.weight.shape != (cast(Any, module).head_dim,) for norm in norms):  # OLMo 2 normalizes all heads at once
        return False
    trial = cast(Any, copy.copy(module))
    trial._modules, trial.training = _stubs(trial, norms), False
    half = random_tensor(1, 5, trial.head_dim // 2)
    angles = torch.cat((half, half), dim=-1)
    x, inputs = random_tensor(1, 5, 8), dict[str, Any](position_embeddings=(angles.cos(), angles.sin()))
    ours = RotaryAttention.forward
    inputs["attention_mask"] = None
    return agree(lambda: trial.forward(x, **inputs)[0], lambda: ours(trial, x, **inputs)[0])


def _stubs(module: Any, norms: list[Any]) -> dict[str, nn.Module]:
    """Returns small submodules for a trial of an attention layer with one key-value head."""
    groups = getattr(module, "num_key_value_groups", 1)  # encoders may have no grouped heads
    queries, dim = groups * module.head_dim, module.head_dim
    sizes = {"q_proj": (8, queries), "k_proj": (8, dim), "v_proj": (8, dim), "o_proj": (queries, 8)}
    parts: dict[str, nn.Module] = {name: LinearPart(*size, place) for place, (name, size) in enumerate(sizes.items())}
    for name, norm in zip(NORMS, norms, strict=False):
        parts[name] = RMSNorm(dim, norm.eps)
    return parts

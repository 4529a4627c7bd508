"""Replaces the attention layers of Llama, Gemma, Phi-3, ModernBERT and others with ones that use our rotary embedding.

Layers are recognized by the names of their submodules, and replaced only if a trial shows that ours compute the same.

B batch, T time, H query heads, K key-value heads, d head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from sansgpu.kernels.norm import RMSNorm
from sansgpu.kernels.rotary import rotate_heads, rotate_joined
from sansgpu.models.attention_interface import NAME, attention_forward
from sansgpu.models.layer_trials import LinearPart, Part, agree, random_tensor, tried, with_forward


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


class RotaryNames(NamedTuple):
    """The names of the linear layers of attention."""

    inputs: tuple[str, ...]  # three layers for queries, keys and values, or one that computes all in this order
    output: str


LLAMA_NAMES = RotaryNames(("q_proj", "k_proj", "v_proj"), "o_proj")
KNOWN_NAMES = (
    LLAMA_NAMES,
    RotaryNames(LLAMA_NAMES.inputs, "Wo"),  # the decoder of ModernBERT
    RotaryNames(("Wqkv",), "Wo"),  # ModernBERT
    RotaryNames(("qkv_proj",), "o_proj"),  # Phi-3
)
NORMS, DROPOUT = ("q_norm", "k_norm"), "out_drop"


class RotaryAttention:
    """Mixin for attention with rotary embedding and, as in Qwen3, an RMSNorm of each head before it."""

    rotary_names: RotaryNames
    head_dim: int
    attention_dropout: float
    training: bool

    @property
    def score_scale(self) -> float:
        return float(getattr(self, "scaling", self.head_dim**-0.5))

    @property
    def softcap(self) -> float | None:
        """The bound of attention scores, as in Gemma 2."""
        return getattr(self, "attn_logit_softcapping", None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        module, shape = cast(Any, self), (*hidden_states.shape[:-1], -1, self.head_dim)
        projected = [getattr(module, name)(hidden_states).view(shape) for name in self.rotary_names.inputs]
        cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
        if len(projected) == 1:
            groups = getattr(module, "num_key_value_groups", 1)  # encoders may have no grouped heads
            kv_heads = projected[0].shape[2] // (groups + 2)
            q, k, v = rotate_joined(projected[0], groups * kv_heads, kv_heads, cos, sin)
        else:
            q, k, v = projected
            q, k = rotate_heads(q, k, cos, sin, *(getattr(module, name, None) for name in NORMS))
            v = v.transpose(1, 2)
        if past_key_values is not None:  # during generation
            k, v = past_key_values.update(k, v, module.layer_idx)
        out, _ = attention_forward(
            module, q, k, v, attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.score_scale,
            softcap=self.softcap,
            **kwargs,
        )  # fmt: skip
        y = getattr(module, self.rotary_names.output)(out.flatten(2))
        return module._modules[DROPOUT](y) if DROPOUT in module._modules else y, None


def fuse_rotary_attention(model: nn.Module) -> None:
    """Makes attention layers that use our attention kernel use our rotary embedding, too, in place.

    Ours rotates whole heads, so layers that rotate only a part of each head keep their own.
    """
    rotated = {2 * buffer.shape[-1] for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for module in model.modules():
        if (names := tried(_rotary_names_of, module)) is not None and rotated <= {cast(Any, module).head_dim}:
            module.__class__ = with_forward(RotaryAttention, type(module))
            cast(Any, module).rotary_names = names


def _rotary_names_of(module: nn.Module) -> RotaryNames | None:
    config: Any = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != NAME or module._parameters:
        return None
    norms: list[Any] = [module._modules[name] for name in NORMS if name in module._modules]
    layers = set(module._modules) - {*NORMS, DROPOUT}
    names = next((names for names in KNOWN_NAMES if layers == {*names.inputs, names.output}), None)
    if names is None or not all(isinstance(norm, RMSNorm) for norm in norms) or (norms and len(names.inputs) == 1):
        return None
    if any(norm.weight.shape != (cast(Any, module).head_dim,) for norm in norms):  # OLMo 2 normalizes all heads at once
        return None
    trial = cast(Any, copy.copy(module))
    trial._modules, trial.training, trial.rotary_names = _stubs(trial, names, norms), False, names
    half = random_tensor(1, 5, trial.head_dim // 2)
    angles = torch.cat((half, half), dim=-1)
    x, inputs = random_tensor(1, 5, 8), {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    ours = copy.copy(trial)
    ours.__class__ = with_forward(RotaryAttention, type(module))
    same = agree(lambda: trial.forward(x, **inputs)[0], lambda: ours.forward(x, **inputs)[0])
    return names if same else None


def _stubs(module: Any, names: RotaryNames, norms: list[Any]) -> dict[str, nn.Module]:
    """Returns small submodules for a trial of an attention layer, with one key-value head if it can have fewer."""
    groups, dim = getattr(module, "num_key_value_groups", 1), module.head_dim
    if len(names.inputs) == 1:
        joined, output = module._modules[names.inputs[0]], module._modules[names.output]
        sizes = {names.inputs[0]: (8, joined.out_features), names.output: (output.in_features, 8)}
    else:
        features = (groups * dim, dim, dim)
        sizes = {name: (8, size) for name, size in zip(names.inputs, features, strict=True)}
        sizes[names.output] = groups * dim, 8
    parts: dict[str, nn.Module] = {name: LinearPart(*size, place) for place, (name, size) in enumerate(sizes.items())}
    if DROPOUT in module._modules:
        parts[DROPOUT] = Part(0.5)
    for name, norm in zip(NORMS, norms, strict=False):
        parts[name] = RMSNorm(dim, norm.eps)
    return parts

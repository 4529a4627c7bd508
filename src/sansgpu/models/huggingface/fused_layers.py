"""Replaces element-wise operations of transformers models with our fused kernels.

Modules are recognized by the names of their submodules, and replaced only if a trial shows that ours compute the same.
Gemma's RMSNorm, for instance, has the same parameters as Qwen's, but multiplies by 1 + weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels.norm import FusedNorm, OffsetRMSNorm, RMSNorm, residual
from sansgpu.kernels.pointwise import gelu, gelu_tanh, swiglu
from sansgpu.models.layer_trials import AttentionPart, Part, agree, random_tensor, replaced_parts, tried, with_forward

# What autograd saves: a tensor, or its shape and the function that recomputes it.
_Saved = torch.Tensor | tuple[torch.Size, Callable[[], torch.Tensor]]


@contextmanager
def recomputed(value: torch.Tensor, compute: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Context in which layers that would save `value` for the backward pass recompute it instead.

    `compute` must return the same bits as `value`. This pays off if an element-wise operation computes `value` for a
    matmul. Other tensors are saved as usual. Has no effect under torch.compile, which decides itself what to save.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    place, count, dtype = value.data_ptr(), value.numel(), value.dtype

    def save(tensor: torch.Tensor) -> _Saved:
        if tensor.data_ptr() == place and tensor.numel() == count and tensor.dtype == dtype:
            return tensor.shape, compute
        return tensor.detach()

    def load(saved: _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        shape, again = saved
        with torch.no_grad():
            return again().to(dtype).view(shape)

    with torch.autograd.graph.saved_tensors_hooks(save, load):
        yield


class PretrainedRMSNorm(RMSNorm):
    """RMSNorm of a transformers model. Calls the original code where our kernel does not run."""

    original: type[nn.Module]

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.original.forward(self, x))


class PretrainedOffsetRMSNorm(PretrainedRMSNorm, OffsetRMSNorm):
    """RMSNorm of a transformers model that multiplies by 1 + weight."""

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.scale.float(), self.eps).type_as(x)


class FusedGELU(nn.Module):
    """Exact GELU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input)


class FusedTanhGELU(nn.Module):
    """GELU in the tanh approximation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(input)


class _GatedFeedForward:
    """Mixin for a feed-forward network whose up projection is multiplied by an activated gate."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    recomputes: bool  # see fuse_layers

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        y = self.gated(gate, up)
        with recomputed(y, lambda: self.gated(gate, up)) if self.recomputes else nullcontext():
            return cast(torch.Tensor, self.down_proj(y))


class SwiGLU(_GatedFeedForward):
    """Mixin for the feed-forward network of Llama, Qwen and Mistral."""

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)


class GeGLU(_GatedFeedForward):
    """Mixin for the feed-forward network of Gemma."""

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        activated = gelu_tanh(gate)
        with recomputed(activated, lambda: gelu_tanh(gate)) if self.recomputes else nullcontext():
            return activated * up


class _FusedBlock:
    """Mixin for a block. Subclasses compute it with fused kernels in `fused_forward`."""

    fused_as = "decoder"  # see module_costs
    self_attn: nn.Module
    mlp: nn.Module
    training: bool
    recomputes: bool  # see fuse_layers

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:  # positional arguments, whose names only the original code knows
            return cast(torch.Tensor, cast(Any, super()).forward(hidden_states, *args, **kwargs))
        return self.fused_forward(hidden_states, {"attention_mask": None, **kwargs})

    def fused_forward(self, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError

    def _recomputed(self, norm: FusedNorm, x: torch.Tensor, inputs: torch.Tensor) -> AbstractContextManager[None]:
        """Context in which layers recompute their `inputs` from x, which the norm saves anyway."""
        return recomputed(inputs, lambda: norm.branch(x)[1]) if self.recomputes else nullcontext()


class PreNormLayer(_FusedBlock):
    """Mixin for the block of Llama, Qwen, Mistral and Granite, which scales the residual branches."""

    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    residual_multiplier: float = 1.0

    def fused_forward(self, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        x, inputs = self.input_layernorm.branch(x)
        with self._recomputed(self.input_layernorm, x, inputs):
            y, _ = self.self_attn(hidden_states=inputs, **kwargs)
        x, inputs = self.post_attention_layernorm.branch(x, self._scaled(y))
        with self._recomputed(self.post_attention_layernorm, x, inputs):
            return residual(x, self._scaled(self.mlp(inputs)), 0.0, self.training)

    def _scaled(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier


class SandwichNormLayer(_FusedBlock):
    """Mixin for the block of Gemma 2 and 3, which has norms before and after attention and feed-forward layers."""

    fused_as = "sandwich"
    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    pre_feedforward_layernorm: FusedNorm
    post_feedforward_layernorm: FusedNorm

    def fused_forward(self, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        x, inputs = self.input_layernorm.branch(x)
        with self._recomputed(self.input_layernorm, x, inputs):
            y, _ = self.self_attn(hidden_states=inputs, **kwargs)
        x, inputs = self.pre_feedforward_layernorm.branch(x, self.post_attention_layernorm(y))
        with self._recomputed(self.pre_feedforward_layernorm, x, inputs):
            y = self.mlp(inputs)
        return residual(x, self.post_feedforward_layernorm(y), 0.0, self.training)


def fuse_layers(model: nn.Module) -> None:
    """Makes the norms, activations, feed-forward networks and blocks of a model use our kernels, in place.

    The backward pass recomputes the results of element-wise operations, unless gradient checkpointing recomputes the
    whole block anyway.
    """
    recomputes = not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    for module in list(model.modules()):
        # Some models share an activation with all others in the process, so it is replaced instead of changed.
        parts = ((name, part) for name, part in module._modules.items() if part is not None)
        fused = {name: new() for name, part in parts if (new := tried(_gelu_of, part)) is not None}
        if fused:
            module._modules = {**module._modules, **fused}
        if (norm := tried(_rms_norm_of, module)) is not None:
            original = cast(Any, module)
            original.original, original.eps = type(module), _epsilon(module)
            module.__class__ = with_forward(norm, type(module))
        elif (gated := tried(_gated_feed_forward_of, module)) is not None:
            module.__class__ = with_forward(gated, type(module))
            cast(Any, module).recomputes = recomputes
    for module in model.modules():
        if (block := tried(_block_of, module)) is not None:
            module.__class__ = with_forward(block, type(module))
            cast(Any, module).recomputes = recomputes


def _epsilon(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", None) or module.eps)


def _rms_norm_of(module: nn.Module) -> type[PretrainedRMSNorm] | None:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and not module._modules
    if not named or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    x, random, trial = random_tensor(3, len(weight)), random_tensor(len(weight)), copy.deepcopy(module)
    cast(Any, trial).weight = nn.Parameter(random)  # because the model may be on the meta device
    for norm, scale in ((PretrainedRMSNorm, random), (PretrainedOffsetRMSNorm, 1.0 + random)):
        if agree(lambda: trial(x), lambda: F.rms_norm(x, weight.shape, scale, _epsilon(module))):  # noqa: B023
            return norm
    return None


def _gelu_of(module: nn.Module) -> type[nn.Module] | None:
    if "GELU" not in type(module).__name__.upper() or module._modules or module._parameters:
        return None
    x = torch.linspace(-8, 8, 97)
    if agree(lambda: module(x), lambda: F.gelu(x)):
        return FusedGELU
    return FusedTanhGELU if agree(lambda: module(x), lambda: F.gelu(x, approximate="tanh")) else None


def _gated_feed_forward_of(module: nn.Module) -> type[_GatedFeedForward] | None:
    if set(module._modules) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down, x = Part(1.5), Part(2.5), Part(0.5), random_tensor(3, 8)
    with replaced_parts(module, {"gate_proj": gate, "up_proj": up, "down_proj": down}):
        if agree(lambda: module.forward(x), lambda: down(F.silu(gate(x)) * up(x))):
            return SwiGLU
        tanh = agree(lambda: module.forward(x), lambda: down(F.gelu(gate(x), approximate="tanh") * up(x)))
        return GeGLU if tanh else None


def _block_of(module: nn.Module) -> type[_FusedBlock] | None:
    norms = {name for name, part in module._modules.items() if isinstance(part, FusedNorm)}
    if set(module._modules) != norms | {"self_attn", "mlp"}:
        return None
    x, names = random_tensor(1, 3, 8), sorted(norms)
    parts = {name: Part(0.5 + place) for place, name in enumerate(names)}
    attention, mlp, scale = AttentionPart(2.5), Part(0.7), float(getattr(module, "residual_multiplier", 1.0))

    def pre_norm() -> torch.Tensor:
        total = x + scale * attention(parts["input_layernorm"](x))[0]
        return cast(torch.Tensor, total + scale * mlp(parts["post_attention_layernorm"](total)))

    def sandwich() -> torch.Tensor:
        total = x + parts["post_attention_layernorm"](attention(parts["input_layernorm"](x))[0])
        after = parts["post_feedforward_layernorm"](mlp(parts["pre_feedforward_layernorm"](total)))
        return cast(torch.Tensor, total + after)

    known: dict[tuple[str, ...], tuple[type[_FusedBlock], Callable[[], torch.Tensor]]] = {
        ("input_layernorm", "post_attention_layernorm"): (PreNormLayer, pre_norm),
        (
            "input_layernorm",
            "post_attention_layernorm",
            "post_feedforward_layernorm",
            "pre_feedforward_layernorm",
        ): (SandwichNormLayer, sandwich),
    }
    if tuple(names) not in known:
        return None
    block, expected = known[tuple(names)]
    with replaced_parts(module, {**parts, "self_attn": attention, "mlp": mlp}):
        return block if agree(lambda: module.forward(x), expected) else None

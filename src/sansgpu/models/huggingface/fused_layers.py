"""Replaces element-wise operations of transformers models with our fused kernels.

Modules are recognized by the names of their submodules, and replaced only if a trial shows that ours compute the same.
Gemma's RMSNorm, for instance, has the same parameters as Qwen's, but multiplies by 1 + weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels.norm import FusedNorm, RMSNorm, residual
from sansgpu.kernels.pointwise import gelu, gelu_tanh, swiglu

# What autograd saves: a tensor, or its shape and the function that recomputes it.
_Saved = torch.Tensor | tuple[torch.Size, Callable[[], torch.Tensor]]


class Part(nn.Module):
    """A cheap function that replaces a submodule in a trial."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return torch.sin(self.number * hidden_states + self.number)


class AttentionPart(Part):
    """Replaces an attention layer in a trial. Returns its output and None for the attention weights."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> Any:
        return super().forward(hidden_states), None


class LinearPart(nn.Module):
    """Replaces a linear layer in a trial."""

    def __init__(self, inputs: int, outputs: int, number: int) -> None:
        super().__init__()
        self.weight = torch.sin((number + 1) * random_tensor(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@contextmanager
def replaced_parts(module: nn.Module, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    before = dict(module._modules)
    module._modules.update(parts)
    try:
        yield
    finally:
        module._modules.update(before)


def random_tensor(*shape: int) -> torch.Tensor:
    """Returns the same random values in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def agree(found: Callable[[], object], expected: Callable[[], torch.Tensor]) -> bool:
    """Returns True if `found` returns what is expected; False otherwise, or if it raises an error."""
    try:
        value = found()
    except Exception:
        return False
    return isinstance(value, torch.Tensor) and torch.allclose(value, expected(), rtol=1e-4, atol=1e-5)


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


class FusedGELU(nn.Module):
    """Exact GELU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input)


class FusedTanhGELU(nn.Module):
    """GELU in the tanh approximation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(input)


class SwiGLU:
    """Mixin for the feed-forward network of Llama, Qwen and Mistral."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    recomputes: bool  # see fuse_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        y = swiglu(gate, up)
        with recomputed(y, lambda: swiglu(gate, up)) if self.recomputes else nullcontext():
            return cast(torch.Tensor, self.down_proj(y))


class PreNormLayer:
    """Mixin for the block of Llama, Qwen and Mistral."""

    fused_as = "decoder"  # see module_costs
    input_layernorm: FusedNorm
    self_attn: nn.Module
    post_attention_layernorm: FusedNorm
    mlp: nn.Module
    training: bool
    recomputes: bool  # see fuse_layers

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:  # positional arguments, whose names only the original code knows
            return cast(torch.Tensor, cast(Any, super()).forward(hidden_states, *args, **kwargs))
        x, inputs = self.input_layernorm.branch(hidden_states)
        with self._recomputed(self.input_layernorm, x, inputs):
            y, _ = self.self_attn(hidden_states=inputs, **{"attention_mask": None, **kwargs})
        x, inputs = self.post_attention_layernorm.branch(x, y)
        with self._recomputed(self.post_attention_layernorm, x, inputs):
            return residual(x, self.mlp(inputs), 0.0, self.training)

    def _recomputed(self, norm: FusedNorm, x: torch.Tensor, inputs: torch.Tensor) -> AbstractContextManager[None]:
        """Context in which layers recompute their `inputs` from x, which the norm saves anyway."""
        return recomputed(inputs, lambda: norm.branch(x)[1]) if self.recomputes else nullcontext()


def fuse_layers(model: nn.Module) -> None:
    """Makes the norms, activations, feed-forward networks and blocks of a model use our kernels, in place.

    The backward pass recomputes the results of element-wise operations, unless gradient checkpointing recomputes the
    whole block anyway.
    """
    recomputes = not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    for module in list(model.modules()):
        if _is_rms_norm(module):
            original = cast(Any, module)
            original.original, original.eps = type(module), float(original.variance_epsilon)
            module.__class__ = PretrainedRMSNorm
        elif (fused := _gelu_of(module)) is not None:
            module.__class__ = fused
        elif _is_swiglu(module):
            module.__class__ = with_forward(SwiGLU, type(module))
            cast(Any, module).recomputes = recomputes
    for module in model.modules():
        if _is_pre_norm_layer(module):
            module.__class__ = with_forward(PreNormLayer, type(module))
            cast(Any, module).recomputes = recomputes


_subclasses: dict[tuple[type, type], type] = {}


def with_forward(mixin: type, original: type) -> type:
    """Returns a subclass of `original` with the forward pass of `mixin`.

    It must be a subclass, because transformers looks for layers by class. It is cached, so that all blocks of a model
    have the same class and torch.compile compiles one graph.
    """
    if (mixin, original) not in _subclasses:
        _subclasses[mixin, original] = type(original.__name__, (mixin, original), {"__module__": original.__module__})
    return _subclasses[mixin, original]


def _is_rms_norm(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    named = type(module).__name__.endswith("RMSNorm") and not module._modules
    if not named or not isinstance(weight, nn.Parameter) or weight.ndim != 1 or eps is None:
        return False
    x, random, trial = random_tensor(3, len(weight)), random_tensor(len(weight)), copy.deepcopy(module)
    cast(Any, trial).weight = nn.Parameter(random)  # because the model may be on the meta device
    return agree(lambda: trial(x), lambda: F.rms_norm(x, weight.shape, random, float(eps)))


def _gelu_of(module: nn.Module) -> type[nn.Module] | None:
    if "GELU" not in type(module).__name__.upper() or module._modules or module._parameters:
        return None
    x = torch.linspace(-8, 8, 97)
    if agree(lambda: module(x), lambda: F.gelu(x)):
        return FusedGELU
    return FusedTanhGELU if agree(lambda: module(x), lambda: F.gelu(x, approximate="tanh")) else None


def _is_swiglu(module: nn.Module) -> bool:
    if set(module._modules) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    gate, up, down, x = Part(1.5), Part(2.5), Part(0.5), random_tensor(3, 8)
    with replaced_parts(module, {"gate_proj": gate, "up_proj": up, "down_proj": down}):
        return agree(lambda: module.forward(x), lambda: down(F.silu(gate(x)) * up(x)))


def _is_pre_norm_layer(module: nn.Module) -> bool:
    parts = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    norms = [module._modules.get(name) for name in ("input_layernorm", "post_attention_layernorm")]
    if set(module._modules) != parts or not all(isinstance(norm, FusedNorm) for norm in norms):
        return False
    first, attention, second, mlp, x = Part(1.5), AttentionPart(2.5), Part(0.5), Part(0.7), random_tensor(1, 3, 8)

    def expected() -> torch.Tensor:
        total: torch.Tensor = x + attention(first(x))[0]
        return total + cast(torch.Tensor, mlp(second(total)))

    stubs = {"input_layernorm": first, "self_attn": attention, "post_attention_layernorm": second, "mlp": mlp}
    with replaced_parts(module, stubs):
        return agree(lambda: module.forward(x), expected)

"""Replaces element-wise operations of transformers models with our fused kernels.

Modules are recognized by the names of their submodules, and replaced only if a trial shows that ours compute the same.
Gemma's RMSNorm, for instance, has the same parameters as Qwen's, but multiplies by 1 + weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels.norm import FusedNorm, OffsetRMSNorm, RMSNorm, residual
from sansgpu.kernels.pointwise import GATES, Activation, gated, gated_half, gelu, gelu_tanh
from sansgpu.models.layer_trials import (
    AttentionPart,
    LinearPart,
    Part,
    agree,
    random_tensor,
    replaced_parts,
    tried,
    with_forward,
)

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


class GatedParts(NamedTuple):
    """The names of the parts of a feed-forward network whose up projection is multiplied by an activated gate."""

    projections: tuple[str, ...]  # the gate and the up projection, or one layer that computes both, the gate first
    down: str
    dropout: str | None
    activation: Activation


LLAMA_PARTS = GatedParts(("gate_proj", "up_proj"), "down_proj", None, Activation.SWIGLU)


class GatedFeedForward:
    """Mixin for a gated feed-forward network, as in Llama, Gemma, Phi-3 and ModernBERT."""

    gated_parts: GatedParts
    recomputes: bool  # see fuse_layers

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        projections, down, dropout, activation = self.gated_parts
        inputs = [getattr(self, name)(hidden_states) for name in projections]
        activate = partial(gated if len(inputs) > 1 else gated_half, activation, *inputs)
        y = activate()
        if dropout is not None and cast(Any, self).training and getattr(self, dropout).p > 0:
            return cast(torch.Tensor, getattr(self, down)(getattr(self, dropout)(y)))
        with recomputed(y, activate) if self.recomputes else nullcontext():
            return cast(torch.Tensor, getattr(self, down)(y))


class _FusedBlock:
    """Mixin for a block. Subclasses compute it with fused kernels in `fused_forward`."""

    fused_as = "decoder"  # see module_costs
    training: bool
    recomputes: bool  # see fuse_layers

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:  # positional arguments, whose names only the original code knows
            return cast(torch.Tensor, cast(Any, super()).forward(hidden_states, *args, **kwargs))
        return self.fused_forward(hidden_states, {"attention_mask": None, **kwargs})

    def fused_forward(self, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError

    def _recomputed(self, norm: nn.Module, x: torch.Tensor, inputs: torch.Tensor) -> AbstractContextManager[None]:
        """Context in which layers recompute their `inputs` from x, which the norm saves anyway."""
        if not self.recomputes or not isinstance(norm, FusedNorm):
            return nullcontext()
        return recomputed(inputs, lambda: norm.branch(x)[1])


class PreNormLayer(_FusedBlock):
    """Mixin for the block of Llama, Qwen, Mistral and Granite, which scales the residual branches."""

    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    residual_multiplier: float = 1.0

    def fused_forward(self, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        first, attention, second, mlp = (getattr(self, name) for name in self.names)
        # The first block of ModernBERT has no norm before attention.
        x, inputs = first.branch(x) if isinstance(first, FusedNorm) else (x, x)
        with self._recomputed(first, x, inputs):
            y, _ = attention(hidden_states=inputs, **kwargs)
        x, inputs = second.branch(x, self._scaled(y))
        with self._recomputed(second, x, inputs):
            return residual(x, self._scaled(mlp(inputs)), 0.0, self.training)

    def _scaled(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier


class ModernBertLayer(PreNormLayer):
    """Mixin for the block of ModernBERT."""

    names = ("attn_norm", "attn", "mlp_norm", "mlp")


class SandwichNormLayer(_FusedBlock):
    """Mixin for the block of Gemma 2 and 3, which has norms before and after attention and feed-forward layers."""

    fused_as = "sandwich"
    self_attn: nn.Module
    mlp: nn.Module
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
        elif (found := tried(_gated_parts_of, module)) is not None:
            module.__class__ = with_forward(GatedFeedForward, type(module))
            cast(Any, module).gated_parts, cast(Any, module).recomputes = found, recomputes
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


def _gated_parts_of(module: nn.Module) -> GatedParts | None:
    """Recognizes separate projections by their names, and a joined one, whose first half is the gate, by its size."""
    inner: dict[str, Any] = {name: part for name, part in module._modules.items() if part is not None}
    dropout = next((name for name, part in inner.items() if isinstance(part, nn.Dropout)), None)
    linears = [name for name, part in inner.items() if hasattr(part, "out_features")]
    others = [name for name in inner if name not in linears and name != dropout]
    activation = _gate_activation(inner[others[0]]) if len(others) == 1 else None
    if activation is None:
        return None
    x, down, drop = random_tensor(3, 8), Part(0.5), Part(0.7)
    if set(linears) == {*LLAMA_PARTS.projections, LLAMA_PARTS.down}:
        names = LLAMA_PARTS._replace(dropout=dropout, activation=activation)
        stubs: list[nn.Module] = [Part(1.5), Part(2.5)]
        gate, up = stubs[0](x), stubs[1](x)
    elif len(linears) == 2 and inner[linears[0]].out_features == 2 * inner[linears[1]].in_features:
        names = GatedParts((linears[0],), linears[1], dropout, activation)
        stubs = [LinearPart(8, 12, 0)]
        gate, up = stubs[0](x).chunk(2, dim=-1)
    else:
        return None
    y = gated(activation, gate, up)
    expected = down(y if dropout is None else drop(y))
    parts = {**dict(zip(names.projections, stubs, strict=True)), names.down: down}
    with replaced_parts(module, parts if dropout is None else {**parts, dropout: drop}):
        return names if agree(lambda: module.forward(x), lambda: expected) else None


def _gate_activation(module: nn.Module) -> Activation | None:
    x = torch.linspace(-8, 8, 97)
    return next((kind for kind in GATES if agree(lambda: module(x), partial(gated, kind, x, torch.ones_like(x)))), None)


def _block_of(module: nn.Module) -> type[_FusedBlock] | None:
    x, scale = random_tensor(1, 3, 8), float(getattr(module, "residual_multiplier", 1.0))
    norms = sorted(name for name in module._modules if name.endswith("norm"))
    parts: dict[str, Any] = {name: Part(0.5 + place) for place, name in enumerate(norms)}

    def pre_norm(block: type[PreNormLayer]) -> torch.Tensor:
        first, attention, second, mlp = (parts[name] for name in block.names)
        total = x + scale * attention(first(x))[0]
        return cast(torch.Tensor, total + scale * mlp(second(total)))

    def sandwich() -> torch.Tensor:
        total = x + parts["post_attention_layernorm"](parts["self_attn"](parts["input_layernorm"](x))[0])
        after = parts["post_feedforward_layernorm"](parts["mlp"](parts["pre_feedforward_layernorm"](total)))
        return cast(torch.Tensor, total + after)

    known: list[tuple[type[_FusedBlock], tuple[str, ...], Callable[[], torch.Tensor]]] = [
        *((block, block.names, partial(pre_norm, block)) for block in (PreNormLayer, ModernBertLayer)),
        (
            SandwichNormLayer,
            (*PreNormLayer.names, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
            sandwich,
        ),
    ]
    for block, names, expected in known:
        if set(module._modules) == set(names) and all(map(partial(_is_norm, module), norms)):
            parts |= {names[1]: AttentionPart(2.5), names[3]: Part(0.7)}
            with replaced_parts(module, parts):
                return block if agree(lambda: module.forward(x), expected) else None
    return None


def _is_norm(module: nn.Module, name: str) -> bool:
    """Returns True if a norm of a block uses our kernel, or is the one that the first block of ModernBERT lacks."""
    part = module._modules[name]
    return isinstance(part, FusedNorm) or (name == ModernBertLayer.names[0] and type(part) is nn.Identity)

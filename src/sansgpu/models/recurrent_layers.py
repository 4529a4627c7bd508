"""Runs the recurrent layers of transformers models with our kernels: gated delta nets, Mamba and Mamba 2.

transformers computes their recurrences and convolutions by functions of the module that defines the layer. The layer's
own code runs here with kernels in their place, so that every family with such a layer is supported.

B rows, T tokens, H value heads, K key heads, d features of queries and keys, e of values, D channels, S sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels import library
from sansgpu.kernels.recurrent.delta_rule import DeltaRuleOptions, delta_rule
from sansgpu.kernels.recurrent.selective_scan import ScanInputs, selective_scan
from sansgpu.kernels.recurrent.short_convolution import short_convolution
from sansgpu.models.layer_trials import with_forward
from sansgpu.models.packed_masks import starts_in

# Keyword argument of models with the starts of packed sequences, (S + 1,). Some families pass it on to recurrent
# layers, others their mask.
STARTS = "sequence_starts"


def _convolution(
    starts: torch.Tensor | None,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Replaces `causal_conv1d_fn`, which takes and returns (B, D, T)."""
    silu = activation in ("silu", "swish")
    out = short_convolution(hidden_states.transpose(1, 2), weight, bias, starts, silu)
    if activation is not None and not silu:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    return out.transpose(1, 2)


def _delta_rule(
    starts: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces `torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule`."""
    normalized, states = given.get("use_qk_l2norm_in_kernel", False), given.get("output_final_state", False)
    options = DeltaRuleOptions(starts, query.shape[-1] ** -0.5, normalized, states)
    return delta_rule(query, key, value, given["g"], given["beta"], options, given.get("initial_state"))


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """Returns the step sizes of a state space model in fp32, from their projection before bias and softplus."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(steps) if softplus else steps


def _mamba2_scan(
    starts: torch.Tensor | None, hidden_states: torch.Tensor, dt: torch.Tensor, *matrices: torch.Tensor, **given: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Replaces `mamba2_chunk_scan`, whose states are (B, H, e, d); `matrices` are Mamba's A, B and C."""
    rates, keys, queries = matrices
    steps = _steps(dt, given.get("dt_bias"), given.get("dt_softplus", False))
    steps = steps.clamp(*given.get("dt_limit", (0.0, float("inf"))))
    dtype, skip, initial = hidden_states.dtype, given.get("D"), given.get("initial_states")
    values = (hidden_states.float() * steps[..., None]).to(dtype)
    options = DeltaRuleOptions(starts, returns_states=given.get("return_final_states", False))
    initial = None if initial is None else initial.transpose(2, 3)
    out, last = delta_rule(queries.to(dtype), keys.to(dtype), values, steps * rates.float(), None, options, initial)
    if skip is not None:
        out = out + skip[:, None] * hidden_states
    return out if last is None else (out, last.transpose(2, 3))


def _mamba_scan(
    starts: torch.Tensor | None, hidden_states: torch.Tensor, dt: torch.Tensor, *matrices: torch.Tensor, **given: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Replaces `mamba_selective_scan`, whose inputs and output are (B, D, T); `matrices` are Mamba's A, B and C."""
    rates, into, out_of = matrices
    steps = _steps(dt.transpose(1, 2), given.get("delta_bias"), given.get("delta_softplus", False))
    skip = rates.new_zeros(len(rates)) if given.get("D") is None else given["D"]
    x = hidden_states.transpose(1, 2)
    inputs = ScanInputs(x, steps, rates, into.transpose(1, 2), out_of.transpose(1, 2), skip)
    out, last = selective_scan(inputs, starts, states=given.get("return_last_state", False))
    gate = given.get("z")
    out = (out if gate is None else out * F.silu(gate.transpose(1, 2))).transpose(1, 2)
    return out if last is None else (out, last)


# The functions of transformers by name, with ours.
_REPLACED: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
}
_RECURRENCES = frozenset(_REPLACED) - {"causal_conv1d_fn"}


class KernelRecurrence:
    """Mixin for a recurrent layer whose loops our kernels compute."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        original = _own_forward(super())
        starts = kwargs.pop(STARTS, None)
        if (carried := starts_in(kwargs.get("attention_mask"))) is not None:
            starts, kwargs["attention_mask"] = carried, None
        if not library.takes(hidden_states):
            return cast(torch.Tensor, original(self, hidden_states, *args, **kwargs))
        ours = {name: partial(replacement, starts) for name, replacement in _REPLACED.items()}
        replaced = FunctionType(
            original.__code__, {**original.__globals__, **ours}, original.__name__, original.__defaults__,
            original.__closure__,
        )  # fmt: skip
        return cast(torch.Tensor, replaced(self, hidden_states, *args, **kwargs))


class RecurrentSize(NamedTuple):
    """The sizes on which the costs of a recurrent layer depend."""

    kind: Literal["delta", "heads", "normed heads", "scan"]  # a delta net, Mamba 2 without and with a norm, or Mamba
    channels: int  # features of the output of the recurrence
    states: int  # elements of the state of a sequence


def recurrent_size(module: nn.Module) -> RecurrentSize | None:
    """Returns the sizes of a layer that `use_recurrent_kernels` has changed; None for other modules."""
    if not isinstance(module, KernelRecurrence):
        return None
    layer: Any = module
    if hasattr(layer, "head_v_dim"):
        channels = layer.num_v_heads * layer.head_v_dim
        return RecurrentSize("delta", channels, channels * layer.head_k_dim)
    if layer.A_log.ndim == 2:  # (D, M)
        return RecurrentSize("scan", layer.A_log.shape[0], layer.A_log.numel())
    channels = layer.num_heads * layer.head_dim
    kind: Literal["heads", "normed heads"] = "normed heads" if hasattr(layer.norm, "weight") else "heads"
    return RecurrentSize(kind, channels, channels * layer.ssm_state_size)


def _own_forward(layer: Any) -> FunctionType:
    """Returns the function that computes a layer's forward pass, without decorators."""
    return cast(FunctionType, inspect.unwrap(layer.forward.__func__))


def use_recurrent_kernels(model: nn.Module) -> None:
    """Makes the recurrent layers of a model use our kernels, in place."""
    for module in model.modules():
        forward = getattr(type(module), "forward", None)
        names = getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ()) if forward else ()
        if _RECURRENCES & set(names):
            module.__class__ = with_forward(KernelRecurrence, type(module))

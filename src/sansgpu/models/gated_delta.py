"""The gated delta net (arXiv 2412.06464), with which some layers of a hybrid decoder replace attention, as in Qwen3.5.

Instead of keys and values of all tokens, a layer keeps a state of constant size, so that its time per token does not
grow with the context.

B batch, T time, N = B T, D width, H value heads, K key heads, d head dim, C = (2 K + H) d channels, W width of the
convolution, S sequences.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels import library
from sansgpu.kernels.linear import Linear, linear_each
from sansgpu.kernels.norm import RMSNorm
from sansgpu.kernels.pointwise import swiglu
from sansgpu.kernels.recurrent.delta_rule import DeltaRuleOptions, delta_rule, reference_delta_rule
from sansgpu.kernels.recurrent.sequences import LayerStates, States, last_inputs
from sansgpu.kernels.recurrent.short_convolution import reference_short_convolution, short_convolution
from sansgpu.models.architectures import CONVOLUTION_WIDTH, DecoderConfig

# Initial decay rates and step sizes, drawn uniformly in log space between these bounds, as in Mamba 2 and flash-linear-
# attention: a head then forgets half of its state in between half a token and 700 tokens. With transformers' initial
# values, which Qwen3.5 does not train from, most heads forget everything at each token.
_RATES, _STEPS = (1.0, 16.0), (1e-3, 1e-1)


class StateCache(Protocol):
    """The interface of a layer's cache: `RowStates` here, or `LayerSlots` in models/generation/kv_cache.py."""

    @property
    def length(self) -> int:
        """0, because states do not say how many tokens they describe; the caches of attention layers do."""

    def states(self) -> LayerStates | None:
        """Returns the states before the sequences of a pass; None if the sequences begin in it."""

    def store(self, states: LayerStates) -> None:
        """Stores the states after the sequences of a pass."""


class RowStates:
    """The states of one layer, with a sequence in each row."""

    length = 0

    def __init__(self) -> None:
        self._states: LayerStates | None = None

    def states(self) -> LayerStates | None:
        return self._states

    def store(self, states: LayerStates) -> None:
        self._states = states


class GatedDeltaNet(nn.Module):
    """A short convolution, the gated delta rule, and an RMSNorm of each head that is multiplied by a gate.

    Each of the K key heads serves H / K value heads. K and d are equal to the key-value heads
    and the head dim of attention.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = config.n_heads, config.kv_heads, config.head_dim
        values, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        self.qkv = Linear(config.d_model, 2 * keys + values, bias=False)
        self.gate = Linear(config.d_model, values, bias=False)
        self.steps = Linear(config.d_model, self.heads, bias=False)  # how much of a value is written
        self.decays = Linear(config.d_model, self.heads, bias=False)
        self.out = Linear(values, config.d_model, bias=False)
        self.qkv.row_blocks, self.gate.row_blocks = 2 * self.key_heads + self.heads, self.heads
        channels = 2 * keys + values
        self.convolution = nn.Conv1d(channels, channels, CONVOLUTION_WIDTH, groups=channels, bias=False)
        self.norm = RMSNorm(self.head_dim, config.decoder.norm_eps)
        self.A_log = nn.Parameter(torch.empty(self.heads))  # log of the decay rates
        self.dt_bias = nn.Parameter(torch.empty(self.heads))  # inverse softplus of the step sizes

    def initialize(self, generator: torch.Generator) -> None:
        """Initializes the convolution like nn.Conv1d, and the decays."""
        bound = CONVOLUTION_WIDTH**-0.5
        self.convolution.weight.uniform_(-bound, bound, generator=generator)
        self.A_log.uniform_(*map(math.log, _RATES), generator=generator)
        steps = self.dt_bias.uniform_(*map(math.log, _STEPS), generator=generator).exp()
        self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def forward(self, x: torch.Tensor, ranges: torch.Tensor, cache: StateCache | None) -> torch.Tensor:
        """(B, T, D) -> (B, T, D). A sequence begins where the key ranges of attention (B, T, 2) do."""
        mixed, gate, steps, decays = linear_each(x, self.qkv, self.gate, self.steps, self.decays)
        before = None if cache is None else cache.states()
        starts = _starts(ranges)
        convolved = self._convolve(mixed, starts, None if before is None else before.inputs)
        keys = self.key_heads * self.head_dim
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in convolved.split([keys, keys, self.heads * self.head_dim], dim=-1)
        )
        wide = self.dt_bias.dtype
        decay = -self.A_log.exp() * F.softplus(decays.to(wide) + self.dt_bias)
        options = DeltaRuleOptions(starts, self.head_dim**-0.5, normalized=True, returns_states=cache is not None)
        y, memory = _delta_rule((q, k, v), decay, steps.sigmoid(), options, None if before is None else before.memory)
        if cache is not None and memory is not None:
            cache.store(LayerStates(self._last_inputs(mixed, starts, before), memory))
        _, normed = self.norm.branch(y)
        merged = swiglu(gate, normed.flatten(2).to(gate.dtype))
        projected: torch.Tensor = self.out(merged)
        return projected

    def _convolve(self, mixed: torch.Tensor, starts: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
        """Convolves mixed (B, T, C), whose sequences begin at `starts`, or continue after `inputs` in each row."""
        weight = self.convolution.weight[:, 0]
        convolve = short_convolution if library.takes(mixed) else reference_short_convolution
        if inputs is None:
            return convolve(mixed, weight, None, starts, True)
        return convolve(_after(inputs, mixed), weight, None, None, True)[:, inputs.shape[2] :]

    def _last_inputs(self, mixed: torch.Tensor, starts: torch.Tensor, before: LayerStates | None) -> torch.Tensor:
        if before is None:
            return last_inputs(mixed.flatten(0, 1).T[None], starts, CONVOLUTION_WIDTH - 1)
        return _after(before.inputs, mixed)[:, 1 - CONVOLUTION_WIDTH :].transpose(1, 2)


def _starts(ranges: torch.Tensor) -> torch.Tensor:
    """Returns the first token of each sequence, then N, (S + 1,), from the key ranges (B, T, 2) of causal attention."""
    begins = ranges[..., 0] == torch.arange(ranges.shape[1], device=ranges.device)
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel())


def _after(inputs: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    return torch.cat((inputs.transpose(1, 2).to(mixed.dtype), mixed), dim=1)


def _delta_rule(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor,
    beta: torch.Tensor,
    options: DeltaRuleOptions,
    initial: torch.Tensor | None,
) -> States:
    """Computes the delta rule; without our kernels token by token, which takes much longer."""
    if library.takes(*qkv):
        return delta_rule(*qkv, decay, beta, options, initial)
    q, k, v = (part.to(decay.dtype) for part in qkv)
    found = reference_delta_rule(q, k, v, decay, beta.to(decay.dtype), options, initial)
    return States(found.out.to(qkv[0].dtype), found.last)

"""Keeps the short causal convolutions of LFM2 inside examples that share a row, and caches their inputs by token.

B batch, T time, D width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.models.huggingface.fused_layers import LinearPart, agree, random_tensor, tried, with_forward

CONVOLUTION = "conv"  # value of `layer_types` in transformers' configs
_PARTS = {"in_proj", "conv", "out_proj"}


@dataclass(frozen=True)
class TokenPositions:
    """The attention mask of convolutions: `positions` (B, T) of tokens in their examples, which may share a row."""

    positions: torch.Tensor


class PackedConvolution:
    """Mixin for a short convolution. It reads the tokens before each one only as far as their example goes back."""

    def forward(
        self, hidden_states: torch.Tensor, past_key_values: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if not isinstance(attention_mask, TokenPositions):
            original = cast(Any, super()).forward(hidden_states, past_key_values, attention_mask, **kwargs)
            return cast(torch.Tensor, original)
        module, positions = cast(Any, self), attention_mask.positions
        before, after, x = module.in_proj(hidden_states).chunk(3, dim=-1)
        x = before * x
        kernel = module.conv.weight[:, 0]  # (D, number of taps), the last one for the token itself
        cached = None if past_key_values is None else _cached(x, past_key_values, module.layer_idx)
        y = x * kernel[:, -1]
        for back in range(1, kernel.shape[1]):
            if cached is None:
                earlier = F.pad(x[:, :-back], (0, 0, min(back, x.shape[1]), 0))
            else:
                earlier = _at(cached, past_key_values.places.view_as(positions) - back)
            y = y + (positions >= back)[..., None] * earlier * kernel[:, -1 - back]
        return cast(torch.Tensor, module.out_proj(after * y.to(x.dtype)))


def _cached(x: torch.Tensor, cache: Any, layer: int) -> torch.Tensor | None:
    """Adds x (B, T, D) to a key-value cache, half of its features as keys and half as values.

    Returns the inputs (B, S, D) of all tokens so far, or None if x has all that it needs.
    """
    new = [half.unsqueeze(1) for half in x.chunk(2, dim=-1)]
    halves = cache.update(*new, layer)
    return None if halves[0] is new[0] else torch.cat(halves, dim=-1)[:, 0]


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns the states (B, S, D) at indices (B, T), or at 0 for negative ones: (B, T, D)."""
    rows = torch.arange(len(states), device=states.device)[:, None]
    return states[rows, places.clamp(min=0)]


def pack_convolutions(model: nn.Module) -> None:
    """Makes the short convolutions of a model support examples that share a row, in place."""
    for module in model.modules():
        if tried(_is_short_convolution, module):
            module.__class__ = with_forward(PackedConvolution, type(module))


def _is_short_convolution(module: nn.Module) -> bool:
    convolution = module._modules.get("conv")
    if set(module._modules) != _PARTS or not isinstance(convolution, nn.Conv1d) or convolution.bias is not None:
        return False
    taps, width = convolution.kernel_size[0], 8
    trial = copy.copy(module)
    small = nn.Conv1d(width, width, taps, padding=taps - 1, groups=width, bias=False)
    small.weight = nn.Parameter(random_tensor(width, 1, taps))
    trial._modules = {
        "in_proj": LinearPart(width, 3 * width, 0),
        "conv": small,
        "out_proj": LinearPart(width, width, 1),
    }
    x, positions = random_tensor(1, 5, width), TokenPositions(torch.arange(5)[None])
    ours = PackedConvolution.forward
    return agree(lambda: trial.forward(x), lambda: ours(cast(Any, trial), x, attention_mask=positions))

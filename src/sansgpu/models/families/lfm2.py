"""LFM2. Its short causal convolutions do not mix examples that share a row, and cache their inputs by token.

B batch, T time, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.models.families import qwen3
from sansgpu.models.family import TINY_GQA, LayerTypes, Settings, full_width_heads
from sansgpu.models.layer_trials import LinearPart, agree, random_tensor, tried, with_forward
from sansgpu.models.packed_masks import TokenPositions

_PARTS = {"in_proj", "conv", "out_proj"}


class PackedConvolution:
    """Mixin for a short convolution, which reads only earlier tokens of the same example."""

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


def _write_layers(settings: Settings) -> dict[str, Any]:
    """Returns the layer types and the feed-forward size, which transformers adjusts in the same way."""
    size = settings["intermediate_size"]
    if settings["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        if "block_ffn_dim_multiplier" in settings:
            size = int(settings["block_ffn_dim_multiplier"] * size)
            size += -size % settings["block_multiple_of"]
    return {"{arch}.feed_forward_length": size, **CONVOLUTIONS.write(settings)}


def _read_layers(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    return {**CONVOLUTIONS.read(value_of, layers), "block_auto_adjust_ff_dim": False}


def _write_types(settings: Settings) -> dict[str, Any]:
    heads = [settings["num_key_value_heads"] * (layer == "full_attention") for layer in settings["layer_types"]]
    return {"{arch}.attention.head_count_kv": heads}


def _read_types(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    heads = value_of("{arch}.attention.head_count_kv")
    types = ["full_attention" if count else "conv" for count in heads]
    return {"num_key_value_heads": max(heads), "layer_types": types}


CONVOLUTIONS = LayerTypes(_write_types, _read_types)  # layers without key-value heads are convolutions


FAMILY = replace(
    qwen3.FAMILY,
    title="LFM2",
    tiny={**TINY_GQA, "layer_types": ["conv", "full_attention"]},
    model_class="Lfm2ForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "norm": "model.embedding_norm",
        "blocks.{}.attention_norm": "model.layers.{}.operator_norm",
        "blocks.{}.feed_forward_norm": "model.layers.{}.ffn_norm",
        "blocks.{}.attention.o": "model.layers.{}.self_attn.out_proj",
        "blocks.{}.attention.q_norm": "model.layers.{}.self_attn.q_layernorm",
        "blocks.{}.attention.k_norm": "model.layers.{}.self_attn.k_layernorm",
        "blocks.{}.convolution.in": "model.layers.{}.conv.in_proj",
        "blocks.{}.convolution.kernel": "model.layers.{}.conv.conv",
        "blocks.{}.convolution.out": "model.layers.{}.conv.out_proj",
        "blocks.{}.feed_forward.gate": "model.layers.{}.feed_forward.w1",
        "blocks.{}.feed_forward.up": "model.layers.{}.feed_forward.w3",
        "blocks.{}.feed_forward.down": "model.layers.{}.feed_forward.w2",
    },
    norm_eps=("norm_eps", "{arch}.attention.layer_norm_rms_epsilon"),
    fixed={"conv_bias": False},
    biases={},
    gguf_settings={"conv_L_cache": "{arch}.shortconv.l_cache"},
    gguf_fixed=full_width_heads,
    gguf_layers=LayerTypes(_write_layers, _read_layers),
    gguf_squeezed={".conv.conv.weight": 1},  # (channels, 1, width)
    gguf_precise=(".shortconv.conv.weight",),
    patches=(pack_convolutions,),
)

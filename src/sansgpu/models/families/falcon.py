"""Falcon with RoPE, whose attention ignores transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.rotary import rotate_heads
from sansgpu.models.attention_interface import attention_forward, give_our_masks
from sansgpu.models.families import qwen3
from sansgpu.models.families.gpt2 import SPLIT as GPT2_SPLIT
from sansgpu.models.family import (
    DIGITS,
    PUNCTUATION,
    TENSOR_NAMES,
    THREE_DIGITS,
    Family,
    LayerTypes,
    PreTokenizer,
    RowOrder,
    Settings,
    full_width_heads,
    part_by_part,
)
from sansgpu.models.layer_trials import with_forward


class FalconAttention:
    """Mixin for attention that computes its scores with our interface."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert position_embeddings is not None
        module = cast(Any, self)
        q, k, v = module._split_heads(module.query_key_value(hidden_states))
        cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
        q, k = rotate_heads(q, k, cos, sin)
        v = v.transpose(1, 2)
        if layer_past is not None:
            k, v = layer_past.update(k, v, module.layer_idx)
        module.num_key_value_groups = q.shape[1] // k.shape[1]
        out, _ = attention_forward(module, q, k, v, attention_mask)
        return module.dense(out.flatten(2)), None


class FalconMLP:
    """Mixin for a feed-forward layer that returns a copy, because the block adds to it in place.

    PyTorch does not allow that for the output of our linear layer, which is a view.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, cast(Any, super()).forward(x).clone())


def use_attention_interface(model: nn.Module) -> None:
    """Makes the attention of Falcon use our attention interface, in place. Models with ALiBi stay unchanged."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "falcon" or config.alibi:
        return
    give_our_masks(model)
    mixins = {"FalconAttention": FalconAttention, "FalconMLP": FalconMLP}
    for module in model.modules():
        if (mixin := mixins.get(type(module).__name__)) is not None:
            module.__class__ = with_forward(mixin, type(module))


def _kv_heads(settings: Settings) -> int:
    """Returns the number of key and value heads, which config.json ignores in older models with one of each."""
    is_single = settings["multi_query"] and not settings["new_decoder_architecture"]
    return 1 if is_single else int(settings["num_kv_heads"])


def _queries_keys_values(name: str, settings: Settings) -> RowOrder | None:
    """Falcon stores the queries of each key head with its key and value; llama.cpp, all queries, keys and values."""
    if ".query_key_value." not in name:
        return None
    groups, size = _kv_heads(settings), settings["head_dim"]
    return part_by_part(groups, [settings["num_attention_heads"] // groups * size, size, size])


def _write(settings: Settings) -> dict[str, Any]:
    return {_KV_HEADS: _kv_heads(settings)}


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    has_two_norms = "blk.0.attn_norm_2.weight" in value_of(TENSOR_NAMES)
    is_single = value_of(_KV_HEADS) == 1 and not has_two_norms
    return {
        "new_decoder_architecture": not is_single,
        "multi_query": is_single,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
    }


def _feed_forward_norm(settings: Settings) -> dict[str, str]:
    """Returns the name of the norm before feed-forward layers, and before attention if it has none of its own."""
    has_two_norms = settings["new_decoder_architecture"] and settings.get("num_ln_in_parallel_attn") != 1
    return {f"{_LAYER}.{'ln_mlp' if has_two_norms else 'input_layernorm'}": "blk.{}.attn_norm"}


def _defaults(settings: Settings) -> Settings:
    heads, width = settings["num_attention_heads"], settings["hidden_size"]
    return {
        **full_width_heads(settings), "num_kv_heads": heads, "ffn_hidden_size": 4 * width, "activation": "gelu",
        "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }  # fmt: skip


_KV_HEADS = "{arch}.attention.head_count_kv"
_LAYER = "transformer.h.{}"
FAMILY = Family(
    title="Falcon",
    tiny={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    model_class="FalconForCausalLM",
    prefix="transformer.",
    modules={
        "embedding": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks.{}.attention_norm": f"{_LAYER}.ln_attn",
        "blocks.{}.attention.qkv": f"{_LAYER}.self_attention.query_key_value",
        "blocks.{}.attention.o": f"{_LAYER}.self_attention.dense",
        "blocks.{}.feed_forward.up": f"{_LAYER}.mlp.dense_h_to_4h",
        "blocks.{}.feed_forward.down": f"{_LAYER}.mlp.dense_4h_to_h",
    },
    sizes={
        **qwen3.FAMILY.sizes,
        "kv_heads": ("num_kv_heads", _KV_HEADS),
        "d_ff": ("ffn_hidden_size", "{arch}.feed_forward_length"),
    },
    norm_eps=("layer_norm_epsilon", "{arch}.attention.layer_norm_epsilon"),
    activation_key="activation",
    defaults=_defaults,
    fixed={"alibi": False, "bias": False, "parallel_attn": True},
    rope_theta=10_000.0,
    gguf_activations=("gelu",),
    gguf_fixed=full_width_heads,
    gguf_more_modules=_feed_forward_norm,
    gguf_layers=LayerTypes(_write, _read),
    gguf_rows=_queries_keys_values,
    pre_tokenizers={"falcon": PreTokenizer((PUNCTUATION, GPT2_SPLIT, DIGITS, THREE_DIGITS))},
    patches=(use_attention_interface,),
)

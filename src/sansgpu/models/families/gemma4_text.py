"""The language model inside Gemma 4, whose last layers use the keys and values of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from sansgpu.models.families import gemma3_text
from sansgpu.models.family import LOGIT_SOFTCAP, SLIDING_WINDOW, TINY_HEAD_DIM, LayerTypes, Settings, windows
from sansgpu.models.layer_trials import with_forward

_SLICES = "_maybe_slice_kv_shared_inputs"  # method that drops the tokens without logits before the last layers
_KV_HEADS, _FEED_FORWARD = "{arch}.attention.head_count_kv", "{arch}.feed_forward_length"


class UncutLayers:
    """Mixin for the decoder, which passes on masks as they are if no token is dropped.

    The original slices the masks even then, and slices of the masks of packed rows are ordinary tensors.
    """

    def _maybe_slice_kv_shared_inputs(
        self, hidden_states: torch.Tensor, *others: Any, logits_to_keep: int | torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        *inputs, kept = others if logits_to_keep is None else (*others, logits_to_keep)
        if isinstance(kept, int) and kept == 0:
            return (hidden_states, *inputs)
        return cast(tuple[Any, ...], getattr(super(), _SLICES)(hidden_states, *inputs, kept, **kwargs))


def keep_masks_whole(model: nn.Module) -> None:
    """Makes decoders that share keys and values between layers support packed rows, in place."""
    for module in model.modules():
        if hasattr(module, _SLICES):
            module.__class__ = with_forward(UncutLayers, type(module))


def _defaults(settings: Settings) -> Settings:
    """Adds the sizes of layers with full attention, which transformers saves layer by layer."""
    found = {"global_head_dim": 512, "num_global_key_value_heads": None}
    for layer in (settings.get("per_layer_config") or {}).values():
        found |= {
            "global_head_dim": layer.get("head_dim", settings["head_dim"]),
            "num_global_key_value_heads": layer.get("num_key_value_heads"),
        }
    return {"tie_word_embeddings": True, **found}


def _write_layers(settings: Settings) -> dict[str, Any]:
    local, size = [one == "sliding_attention" for one in settings["layer_types"]], settings["intermediate_size"]
    values: dict[str, Any] = _WINDOWS.write(settings)
    if settings.get("use_double_wide_mlp"):
        own = len(local) - settings["num_kv_shared_layers"]
        values[_FEED_FORWARD] = [size * (1 if layer < own else 2) for layer in range(len(local))]
    if settings.get("attention_k_eq_v"):
        few = settings["num_key_value_heads"]
        wide = settings.get("num_global_key_value_heads") or few
        values[_KV_HEADS] = [few if is_local else wide for is_local in local]
    return values


def _read_layers(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    found = _WINDOWS.read(value_of, layers)
    sizes, heads = value_of(_FEED_FORWARD), value_of(_KV_HEADS)
    if isinstance(sizes, list):
        found |= {"intermediate_size": sizes[0], "use_double_wide_mlp": sizes[-1] != sizes[0]}
    if isinstance(heads, list):
        full = found["layer_types"].index("full_attention")
        few = next(count for count, one in zip(heads, found["layer_types"], strict=True) if one != "full_attention")
        found |= {"num_key_value_heads": few, "num_global_key_value_heads": heads[full], "attention_k_eq_v": True}
    return found


def _fixed(settings: Settings) -> Settings:
    """Returns what llama.cpp assumes: as many embeddings for the layers as for tokens, and causal attention."""
    fixed = {"use_bidirectional_attention": None} if settings.get("use_bidirectional_attention") == "all" else {}
    return (
        {**fixed, "vocab_size_per_layer_input": settings["vocab_size"]}
        if settings["hidden_size_per_layer_input"]
        else fixed
    )


_WINDOWS = windows(6)
FAMILY = replace(
    gemma3_text.FAMILY,
    title="Gemma 4",
    # Like E2B: the last layers share keys and values, and each layer has an embedding of its own.
    tiny={
        **TINY_HEAD_DIM, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32, "sliding_window": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1024, "final_logit_softcapping": 30.0,
    },
    model_class="Gemma4ForCausalLM",
    modules={
        **gemma3_text.FAMILY.modules,
        "layer_embedding": "model.embed_tokens_per_layer",
        "layer_embedding_projection": "model.per_layer_model_projection",
        "layer_embedding_norm": "model.per_layer_projection_norm",
        "blocks.{}.layer_embedding.gate": "model.layers.{}.per_layer_input_gate",
        "blocks.{}.layer_embedding.projection": "model.layers.{}.per_layer_projection",
        "blocks.{}.layer_embedding.norm": "model.layers.{}.post_per_layer_input_norm",
    },
    gguf_weights={"model.layers.{}.layer_scalar": "blk.{}.layer_output_scale.weight"},
    sizes={**gemma3_text.FAMILY.sizes, "head_dim": ("head_dim", "{arch}.attention.key_length_swa")},
    defaults=_defaults,
    fixed={"enable_moe_block": False},
    gguf_name="gemma4",
    gguf_settings={
        **SLIDING_WINDOW,
        "global_head_dim": "{arch}.attention.key_length",
        "num_kv_shared_layers": "{arch}.attention.shared_kv_layers",
        "hidden_size_per_layer_input": "{arch}.embedding_length_per_layer_input",
    },
    gguf_optional=LOGIT_SOFTCAP,
    gguf_fixed=_fixed,
    gguf_layers=LayerTypes(_write_layers, _read_layers),
    gguf_norm_offset=0.0,
    gguf_rope_types=("proportional",),
    patches=(keep_masks_whole,),
    older_rope=None,
)  # fmt: skip

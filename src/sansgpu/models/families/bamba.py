"""Bamba, in which Mamba 2 layers take the place of most attention layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.families import granitemoehybrid, llama, mamba2
from sansgpu.models.family import TINY_GQA, LayerTypes, RowOrder, Settings, full_width_heads, rope_of

_LAYER = "model.layers.{}"
LATER_MODULES = {  # those after attention or Mamba 2
    "norm": "model.final_layernorm",
    "blocks.{}.feed_forward_norm": f"{_LAYER}.pre_ff_layernorm",
    "blocks.{}.feed_forward.gate": f"{_LAYER}.feed_forward.gate_proj",
    "blocks.{}.feed_forward.up": f"{_LAYER}.feed_forward.up_proj",
    "blocks.{}.feed_forward.down": f"{_LAYER}.feed_forward.down_proj",
}
_KV_HEADS, _INNER = "{arch}.attention.head_count_kv", "{arch}.ssm.inner_size"


def _write(settings: Settings) -> dict[str, Any]:
    attends = settings.get("attn_layer_indices") or []
    layers = range(settings["num_hidden_layers"])
    return {
        _KV_HEADS: [settings["num_key_value_heads"] * (layer in attends) for layer in layers],
        _INNER: settings["mamba_expand"] * settings["hidden_size"],
        "{arch}.rope.scaling.finetuned": True,
    }


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    heads, inner = value_of(_KV_HEADS), value_of(_INNER)
    return {
        "num_key_value_heads": max(heads),
        "attn_layer_indices": [layer for layer, count in enumerate(heads) if count],
        "mamba_d_head": inner // value_of("{arch}.ssm.time_step_rank"),
        "mamba_expand": inner // value_of("{arch}.embedding_length"),
    }


def _rotary_pairs(name: str, settings: Settings) -> RowOrder | None:
    rotated = int(settings["head_dim"] * rope_of(settings).get("partial_rotary_factor", 1.0))
    return llama.adjacent_rotary_pairs(name, settings, rotated)


FAMILY = replace(
    granitemoehybrid.FAMILY,
    title="Bamba",
    tiny={**TINY_GQA, **granitemoehybrid.TINY_MAMBA2, "attn_layer_indices": [1]},
    model_class="BambaForCausalLM",
    modules={
        **{ours: theirs for ours, theirs in granitemoehybrid.FAMILY.modules.items() if "expert" not in ours},
        **LATER_MODULES,
    },
    fixed={**granitemoehybrid.FAMILY.fixed, "mlp_bias": False},
    gguf_recognizes=lambda metadata: "granitehybrid.embedding_scale" not in metadata,
    gguf_settings=granitemoehybrid.SIZES,
    gguf_fixed=lambda settings: {**full_width_heads(settings), **mamba2.unlimited_steps(settings)},
    gguf_modules={f"{_LAYER}.feed_forward.{key}_proj": f"blk.{{}}.ffn_{key}" for key in ("gate", "up", "down")},
    gguf_more_modules=lambda settings: {},
    gguf_divided=lambda settings: {},
    gguf_layers=LayerTypes(_write, _read),
    gguf_rows=_rotary_pairs,
    gguf_precise=mamba2.PRECISE,
)

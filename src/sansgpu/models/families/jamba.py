"""Jamba, which alternates Mamba layers with attention, and feed-forward layers with mixtures of experts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sansgpu.models.families import mamba, qwen3
from sansgpu.models.families.qwen3_moe import ROUTER, expert_counts
from sansgpu.models.family import TENSOR_NAMES, TINY_GQA, LayerTypes, Settings

_LAYER = "model.layers.{}"
_EXPERTS = f"{_LAYER}.feed_forward.experts"
_MODULES = {
    "norm": "model.final_layernorm",
    "blocks.{}.feed_forward_norm": f"{_LAYER}.pre_ff_layernorm",
    "blocks.{}.feed_forward.gate": f"{_LAYER}.feed_forward.gate_proj",
    "blocks.{}.feed_forward.up": f"{_LAYER}.feed_forward.up_proj",
    "blocks.{}.feed_forward.down": f"{_LAYER}.feed_forward.down_proj",
    "blocks.{}.router": f"{_LAYER}.feed_forward.router",
    "blocks.{}.experts.gate": f"{_EXPERTS}.gate_proj",
    "blocks.{}.experts.up": f"{_EXPERTS}.up_proj",
    "blocks.{}.experts.down": f"{_EXPERTS}.down_proj",
    "blocks.{}.mixer.in": f"{_LAYER}.mamba.in_proj",
    "blocks.{}.mixer.convolution": f"{_LAYER}.mamba.conv1d",
    "blocks.{}.mixer.inputs": f"{_LAYER}.mamba.x_proj",
    "blocks.{}.mixer.steps": f"{_LAYER}.mamba.dt_proj",
    "blocks.{}.mixer.steps_norm": f"{_LAYER}.mamba.dt_layernorm",
    "blocks.{}.mixer.into_norm": f"{_LAYER}.mamba.b_layernorm",
    "blocks.{}.mixer.out_of_norm": f"{_LAYER}.mamba.c_layernorm",
    "blocks.{}.mixer.out": f"{_LAYER}.mamba.out_proj",
}


def _write(settings: Settings) -> dict[str, Any]:
    period, offset = settings["attn_layer_period"], settings["attn_layer_offset"]
    attends = [layer % period == offset for layer in range(settings["num_hidden_layers"])]
    return {
        "{arch}.attention.head_count_kv": [settings["num_key_value_heads"] * one for one in attends],
        "{arch}.ssm.inner_size": settings["mamba_expand"] * settings["hidden_size"],
    }


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    heads, names = value_of("{arch}.attention.head_count_kv"), value_of(TENSOR_NAMES)
    attention = _pattern([bool(count) for count in heads])
    experts = _pattern([f"blk.{layer}{ROUTER}" in names for layer in range(layers)])
    return {
        "num_key_value_heads": max(heads),
        **{f"attn_layer_{key}": value for key, value in attention.items()},
        **{f"expert_layer_{key}": value for key, value in experts.items()},
        "mamba_expand": value_of("{arch}.ssm.inner_size") // value_of("{arch}.embedding_length"),
    }


def _pattern(layers: Sequence[bool]) -> dict[str, int]:
    """Returns the period and the offset of the layers that are True."""
    places = [place for place, one in enumerate(layers) if one] or [0]
    period = places[1] - places[0] if len(places) > 1 else len(layers)
    return {"period": period, "offset": places[0]}


FAMILY = replace(
    qwen3.FAMILY,
    title="Jamba",
    tiny={
        **TINY_GQA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    model_class="JambaForCausalLM",
    modules={
        **{ours: name for ours, name in qwen3.FAMILY.modules.items() if not ours.endswith(("q_norm", "k_norm"))},
        **_MODULES,
    },
    fixed={"mamba_conv_bias": True, "mamba_proj_bias": False},
    biases={},
    rotary=False,
    gguf_name="jamba",
    gguf_settings={
        **expert_counts("num_experts"),
        "mamba_d_conv": "{arch}.ssm.conv_kernel",
        "mamba_d_state": "{arch}.ssm.state_size",
        "mamba_dt_rank": "{arch}.ssm.time_step_rank",
    },
    gguf_modules={
        f"{_EXPERTS}.gate_proj": "blk.{}.ffn_gate_exps",
        f"{_EXPERTS}.up_proj": "blk.{}.ffn_up_exps",
        f"{_EXPERTS}.down_proj": "blk.{}.ffn_down_exps",
    },
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights=mamba.mixer_weights(f"{_LAYER}.mamba"),
    gguf_layout=mamba.mixer_layout,
    gguf_squeezed=mamba.SQUEEZED,
    gguf_precise=(ROUTER, *mamba.PRECISE),
    lora_excludes=mamba.FAMILY.lora_excludes,
)  # fmt: skip

"""Granite 4, in which Mamba 2 layers take the place of most attention layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.families import granite, granitemoe, mamba2
from sansgpu.models.families.mamba import SQUEEZED
from sansgpu.models.family import Division, LayerTypes, Settings, full_width_heads

TINY_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
SIZES = mamba2.sizes("mamba_n_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
ATTENTION = ("attention", "full_attention")
_LAYER = "model.layers.{}"
_SHARED = f"{_LAYER}.shared_mlp"


def _write(settings: Settings) -> dict[str, Any]:
    heads = [settings["num_key_value_heads"] * (kind in ATTENTION) for kind in settings["layer_types"]]
    experts = settings["num_local_experts"]
    return {
        "{arch}.attention.head_count_kv": heads,
        "{arch}.rope.scaling.finetuned": settings.get("position_embedding_type") == "rope",
        "{arch}.ssm.inner_size": settings["mamba_n_heads"] * settings["mamba_d_head"],
        "{arch}.expert_count": experts,
        "{arch}.expert_used_count": settings["num_experts_per_tok"] if experts else 0,
        "{arch}.expert_shared_feed_forward_length": settings["shared_intermediate_size"],
    }


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    heads, inner = value_of("{arch}.attention.head_count_kv"), value_of("{arch}.ssm.inner_size")
    shared = value_of("{arch}.expert_shared_feed_forward_length") or value_of("{arch}.feed_forward_length")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "position_embedding_type": "rope" if value_of("{arch}.rope.scaling.finetuned") else "nope",
        "mamba_d_head": inner // value_of("{arch}.ssm.time_step_rank"),
        "mamba_expand": inner // value_of("{arch}.embedding_length"),
        "num_local_experts": value_of("{arch}.expert_count") or 0,
        "num_experts_per_tok": value_of("{arch}.expert_used_count") or 0,
        "shared_intermediate_size": shared,
    }


def _feed_forward(settings: Settings) -> dict[str, str]:
    """Returns the names of the layer that all tokens use, which has its own beside experts."""
    kind = "_shexp" if settings["num_local_experts"] else ""
    modules = {"gate_linear": "gate", "up_linear": "up", "output_linear": "down"}
    return {f"{_SHARED}.{ours}": f"blk.{{}}.ffn_{theirs}{kind}" for ours, theirs in modules.items()}


def _halves(settings: Settings) -> dict[str, Division]:
    size = settings["shared_intermediate_size"]
    return {f"{_SHARED}.input_linear": Division({f"{_SHARED}.gate_linear": size, f"{_SHARED}.up_linear": size})}


def _fixed(settings: Settings) -> Settings:
    """Returns the values that llama.cpp assumes. Without experts, it knows one size of feed-forward layers."""
    same_size = {} if settings["num_local_experts"] else {"shared_intermediate_size": settings["intermediate_size"]}
    return {**full_width_heads(settings), **mamba2.unlimited_steps(settings), **same_size}


FAMILY = replace(
    granitemoe.FAMILY,
    title="Granite 4",
    tiny={
        **granitemoe.FAMILY.tiny, **TINY_MAMBA2, "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 96,
    },
    model_class="GraniteMoeHybridForCausalLM",
    modules={
        **granitemoe.FAMILY.modules,
        "blocks.{}.shared_expert.gate": f"{_SHARED}.gate_linear",
        "blocks.{}.shared_expert.up": f"{_SHARED}.up_linear",
        "blocks.{}.shared_expert.down": f"{_SHARED}.output_linear",
        "blocks.{}.mixer.in": f"{_LAYER}.mamba.in_proj",
        "blocks.{}.mixer.convolution": f"{_LAYER}.mamba.conv1d",
        "blocks.{}.mixer.norm": f"{_LAYER}.mamba.norm",
        "blocks.{}.mixer.out": f"{_LAYER}.mamba.out_proj",
    },
    fixed={"mamba_conv_bias": True, "mamba_proj_bias": False},
    gguf_name="granitehybrid",
    gguf_settings={**granite.FAMILY.gguf_settings, **SIZES},
    gguf_fixed=_fixed,
    gguf_more_modules=_feed_forward,
    gguf_divided=_halves,
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights=mamba2.mixer_weights(f"{_LAYER}.mamba"),
    gguf_layout=mamba2.mixer_layout("mamba_n_groups", "mamba"),
    gguf_squeezed=SQUEEZED,
    gguf_precise=(*granitemoe.FAMILY.gguf_precise, *mamba2.PRECISE),
    lora_excludes=mamba2.FAMILY.lora_excludes,
)  # fmt: skip

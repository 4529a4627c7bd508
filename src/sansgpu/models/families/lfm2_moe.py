"""LFM2-MoE, whose later layers are mixtures of experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.families import lfm2
from sansgpu.models.families.qwen3_moe import EXPERT_SIZE, ROUTER, expert_counts
from sansgpu.models.family import LayerTypes, Settings

_SIGMOID = 2  # llama.cpp's number of this function of the router
_FEED_FORWARD = "model.layers.{}.feed_forward"


def _write(settings: Settings) -> dict[str, Any]:
    heads = [settings["num_key_value_heads"] * (kind == "full_attention") for kind in settings["layer_types"]]
    return {"{arch}.attention.head_count_kv": heads, "{arch}.expert_gating_func": _SIGMOID}


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    heads = value_of("{arch}.attention.head_count_kv")
    types = ["full_attention" if count else "conv" for count in heads]
    return {"num_key_value_heads": max(heads), "layer_types": types}


FAMILY = replace(
    lfm2.FAMILY,
    title="LFM2-MoE",
    tiny={
        **lfm2.FAMILY.tiny, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    model_class="Lfm2MoeForCausalLM",
    modules={
        **lfm2.FAMILY.modules,
        "blocks.{}.router": f"{_FEED_FORWARD}.gate",
        "blocks.{}.experts.gate": f"{_FEED_FORWARD}.experts.gate_proj",
        "blocks.{}.experts.up": f"{_FEED_FORWARD}.experts.up_proj",
        "blocks.{}.experts.down": f"{_FEED_FORWARD}.experts.down_proj",
    },
    fixed={"conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    gguf_name="lfm2moe",
    gguf_settings={
        **lfm2.FAMILY.gguf_settings,
        **expert_counts("num_experts"),
        **EXPERT_SIZE,
        "num_dense_layers": "{arch}.leading_dense_block_count",
    },
    gguf_modules={
        f"{_FEED_FORWARD}.experts.gate_proj": "blk.{}.ffn_gate_exps",
        f"{_FEED_FORWARD}.experts.up_proj": "blk.{}.ffn_up_exps",
        f"{_FEED_FORWARD}.experts.down_proj": "blk.{}.ffn_down_exps",
    },
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights={f"{_FEED_FORWARD}.expert_bias": "blk.{}.exp_probs_b.bias"},
    gguf_precise=(*lfm2.FAMILY.gguf_precise, ROUTER),
)  # fmt: skip

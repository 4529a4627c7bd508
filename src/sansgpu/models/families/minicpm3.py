"""MiniCPM3, whose keys and values are computed from latent vectors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.families import qwen3
from sansgpu.models.family import TINY_LATENT, LayerTypes, Settings

_ATTENTION = "model.layers.{}.self_attn"
LATENT = {  # modules of attention with latent queries, keys and values
    "blocks.{}.attention.q_a": f"{_ATTENTION}.q_a_proj",
    "blocks.{}.attention.q_a_norm": f"{_ATTENTION}.q_a_layernorm",
    "blocks.{}.attention.q_b": f"{_ATTENTION}.q_b_proj",
    "blocks.{}.attention.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
    "blocks.{}.attention.kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
    "blocks.{}.attention.kv_b": f"{_ATTENTION}.kv_b_proj",
}
LATENT_RANKS = {
    "q_lora_rank": "{arch}.attention.q_lora_rank",
    "kv_lora_rank": "{arch}.attention.kv_lora_rank",
    "qk_rope_head_dim": "{arch}.rope.dimension_count",
}
_KEY_LENGTH, _VALUE_LENGTH = "{arch}.attention.key_length", "{arch}.attention.value_length"


def _write(settings: Settings) -> dict[str, Any]:
    key_length = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    return {_KEY_LENGTH: key_length, _VALUE_LENGTH: settings["v_head_dim"]}


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    rotated = value_of(LATENT_RANKS["qk_rope_head_dim"])
    full_width = value_of("{arch}.embedding_length") // value_of("{arch}.attention.head_count")
    return {
        "head_dim": rotated,
        "qk_nope_head_dim": value_of(_KEY_LENGTH) - rotated,
        "v_head_dim": value_of(_VALUE_LENGTH) or full_width,
    }


FAMILY = replace(
    qwen3.FAMILY,
    title="MiniCPM3",
    tiny=TINY_LATENT,
    model_class="MiniCPM3ForCausalLM",
    modules={
        **{
            ours: theirs
            for ours, theirs in qwen3.FAMILY.modules.items()
            if ".attention." not in ours or ours.endswith(".o")
        },
        **LATENT,
    },
    activations={},
    defaults=lambda settings: {
        "head_dim": settings["qk_rope_head_dim"], "num_key_value_heads": settings["num_attention_heads"],
        "hidden_act": "silu", "tie_word_embeddings": True,
    },
    fixed={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    biases={**qwen3.ATTENTION_BIAS, "mlp_bias": ("all",)},
    gguf_settings=LATENT_RANKS,
    gguf_fixed=lambda settings: {"num_key_value_heads": settings["num_attention_heads"]},
    gguf_layers=LayerTypes(_write, _read),
    gguf_yarn=False,
    gguf_rope_types=("longrope",),
)  # fmt: skip

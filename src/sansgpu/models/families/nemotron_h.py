"""Nemotron-H, each of whose layers is Mamba 2, attention or a feed-forward network alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.models.families import mamba2, qwen3
from sansgpu.models.families.mamba import SQUEEZED
from sansgpu.models.family import TINY_HEAD_DIM, LayerTypes, Settings

_ATTENTION, _FEED_FORWARD = ("attention", "full_attention"), "mlp"
_MIXER = "model.layers.{}.mixer"
_PARTS = {  # last part of transformers' name -> of llama.cpp's
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "up_proj": "ffn_up",
    "down_proj": "ffn_down", "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out",
}  # fmt: skip


def _write(settings: Settings) -> dict[str, Any]:
    kinds = settings["layers_block_type"]
    return {
        "{arch}.attention.head_count_kv": [settings["num_key_value_heads"] * (kind in _ATTENTION) for kind in kinds],
        "{arch}.feed_forward_length": [settings["intermediate_size"] * (kind == _FEED_FORWARD) for kind in kinds],
        "{arch}.attention.value_length": settings["head_dim"],
        "{arch}.attention.layer_norm_epsilon": settings["layer_norm_epsilon"],  # llama.cpp requires both keys
        "{arch}.ssm.inner_size": settings["mamba_num_heads"] * settings["mamba_head_dim"],
    }


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    heads, sizes = value_of("{arch}.attention.head_count_kv"), value_of("{arch}.feed_forward_length")
    kinds = [
        "full_attention" if count else _FEED_FORWARD if size else "linear_attention"
        for count, size in zip(heads, sizes, strict=True)
    ]
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(sizes),
        "mamba_head_dim": value_of("{arch}.ssm.inner_size") // value_of("{arch}.ssm.time_step_rank"),
    }


FAMILY = replace(
    qwen3.FAMILY,
    title="Nemotron-H",
    tiny={
        **TINY_HEAD_DIM, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
    },
    model_class="NemotronHForCausalLM",
    modules={
        "embedding": "model.embeddings",
        "norm": "model.norm_f",
        "head": "lm_head",
        "blocks.{}.norm": "model.layers.{}.norm",
    },
    norm_eps=("layer_norm_epsilon", "{arch}.attention.layer_norm_rms_epsilon"),
    activation_key="mlp_hidden_act",
    defaults=lambda settings: {
        "num_hidden_layers": len(settings["layers_block_type"]), "mlp_hidden_act": "relu2",
        "tie_word_embeddings": False,
    },
    fixed={"use_bias": False, "use_conv_bias": True, "mamba_proj_bias": False, "mlp_bias": False},
    rotary=False,
    gguf_name="nemotron_h",
    gguf_activations=("relu2",),
    gguf_settings=mamba2.sizes("mamba_num_heads", "ssm_state_size", "n_groups", "conv_kernel"),
    gguf_fixed=mamba2.unlimited_steps,
    gguf_modules={f"{_MIXER}.{ours}": f"blk.{{}}.{theirs}" for ours, theirs in _PARTS.items()},
    gguf_layers=LayerTypes(_write, _read),
    gguf_weights=mamba2.mixer_weights(_MIXER),
    gguf_layout=mamba2.mixer_layout("n_groups", "mixer"),
    gguf_squeezed=SQUEEZED,
    gguf_precise=mamba2.PRECISE,
    lora_excludes=mamba2.FAMILY.lora_excludes,
)  # fmt: skip

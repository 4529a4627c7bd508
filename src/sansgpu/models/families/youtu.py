"""Youtu, which llama.cpp computes as DeepSeek V2 without experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sansgpu.models.families import minicpm3, qwen3
from sansgpu.models.family import Division, LayerTypes, Layout, Settings, part_by_part

_ATTENTION = "model.layers.{}.self_attn"
_KEYS, _VALUES = f"{_ATTENTION}.k_b_proj", f"{_ATTENTION}.v_b_proj"
_HEADS = "{arch}.attention.head_count"
_KEY_LENGTH, _VALUE_LENGTH = "{arch}.attention.key_length_mla", "{arch}.attention.value_length_mla"


def _keys_and_values(settings: Settings) -> dict[str, Division]:
    """Returns how llama.cpp divides the projection that has keys and values of each head together."""
    heads, sizes = settings["num_attention_heads"], (settings["qk_nope_head_dim"], settings["v_head_dim"])
    rows = dict(zip((_KEYS, _VALUES), (heads * size for size in sizes), strict=True))
    return {f"{_ATTENTION}.kv_b_proj": Division(rows, part_by_part(heads, sizes))}


def _layout(name: str, settings: Settings) -> Layout | None:
    """llama.cpp has a matrix for each head, and multiplies queries by the transpose of that of keys."""
    heads = settings["num_attention_heads"]

    def by_head(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(heads, -1, rows.shape[-1])

    if name.endswith(".v_b_proj.weight"):
        return Layout(by_head, lambda values: values.flatten(0, 1))
    if name.endswith(".k_b_proj.weight"):
        return Layout(lambda rows: by_head(rows).transpose(1, 2), lambda keys: keys.transpose(1, 2).flatten(0, 1))
    return None


def _write(settings: Settings) -> dict[str, Any]:
    latent, rotated = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    return {
        f"{_HEADS}_kv": 1,  # llama.cpp caches the latent vectors, which all heads share
        "{arch}.attention.key_length": latent + rotated,
        "{arch}.attention.value_length": latent,
        _KEY_LENGTH: settings["qk_nope_head_dim"] + rotated,
        _VALUE_LENGTH: settings["v_head_dim"],
        "{arch}.leading_dense_block_count": settings["num_hidden_layers"],
        "{arch}.expert_feed_forward_length": settings["intermediate_size"],
        "{arch}.expert_shared_count": 0,
    }


def _read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    rotated = value_of(minicpm3.LATENT_RANKS["qk_rope_head_dim"])
    return {
        "head_dim": rotated,
        "qk_nope_head_dim": value_of(_KEY_LENGTH) - rotated,
        "v_head_dim": value_of(_VALUE_LENGTH),
        "num_key_value_heads": value_of(_HEADS),
    }


FAMILY = replace(
    minicpm3.FAMILY,
    title="Youtu",
    model_class="YoutuForCausalLM",
    modules={
        **minicpm3.FAMILY.modules,
        "blocks.{}.attention.k_b": _KEYS,
        "blocks.{}.attention.v_b": _VALUES,
    },
    fixed={"rope_interleave": True},
    biases=qwen3.ATTENTION_BIAS,
    gguf_name="deepseek2",
    gguf_recognizes=lambda metadata: not metadata.get("deepseek2.expert_count"),
    gguf_divided=_keys_and_values,
    gguf_layers=LayerTypes(_write, _read),
    gguf_layout=_layout,
    gguf_rope_types=(),
)

"""Rules of llama.cpp for some architectures: the order of rows, the types of layers, and values that it assumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sansgpu.models.formats.layout import LayerTypes, RowOrder, Settings


def rotary_pairs_adjacent(name: str, settings: Settings) -> RowOrder | None:
    """llama.cpp's first RoPE kernel takes the two rows of a rotary pair from adjacent rows."""
    if name.endswith("q_proj.weight"):
        return RowOrder((settings["num_attention_heads"], 2, settings["head_dim"] // 2), 1)
    if name.endswith("k_proj.weight"):
        return RowOrder((settings["num_key_value_heads"], 2, settings["head_dim"] // 2), 1)
    return None


def heads_before_parts(name: str, settings: Settings) -> RowOrder | None:
    """GPT-NeoX stores query, key and value by head; llama.cpp stores all queries, then all keys and all values."""
    if ".query_key_value." not in name:
        return None
    return RowOrder((settings["num_attention_heads"], 3, settings["head_dim"]), 0)


def heads_as_wide_as_the_model(settings: Settings) -> Settings:
    return {"head_dim": settings["hidden_size"] // settings["num_attention_heads"]}


def every_fourth_without_rope(settings: Settings) -> Settings:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(settings["num_hidden_layers"])]}


def windows(period: int) -> LayerTypes:
    """Sliding windows in all layers but each `period`-th, which is llama.cpp's default for a file that names none."""
    key = "{arch}.attention.sliding_window_pattern"

    def read(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
        found = value_of(key) or period
        local = found if isinstance(found, list) else [(layer + 1) % found != 0 for layer in range(layers)]
        return {"layer_types": ["sliding_attention" if one else "full_attention" for one in local]}

    return LayerTypes(lambda settings: {key: [one == "sliding_attention" for one in settings["layer_types"]]}, read)


def write_convolutions(settings: Settings) -> dict[str, Any]:
    """Returns LFM2's layer types and its feed-forward size, which transformers adjusts in the same way."""
    size = settings["intermediate_size"]
    if settings["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        if "block_ffn_dim_multiplier" in settings:
            size = int(settings["block_ffn_dim_multiplier"] * size)
            size += -size % settings["block_multiple_of"]
    heads = [settings["num_key_value_heads"] * (layer == "full_attention") for layer in settings["layer_types"]]
    return {"{arch}.feed_forward_length": size, "{arch}.attention.head_count_kv": heads}


def read_convolutions(value_of: Callable[[str], Any], layers: int) -> dict[str, Any]:
    heads = value_of("{arch}.attention.head_count_kv")
    types = ["full_attention" if count else "conv" for count in heads]
    return {"num_key_value_heads": max(heads), "layer_types": types, "block_auto_adjust_ff_dim": False}

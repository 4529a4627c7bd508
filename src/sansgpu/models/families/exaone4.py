"""EXAONE 4, which has norms only after attention and feed-forward layers."""

from dataclasses import replace

from sansgpu.models.families import olmo2
from sansgpu.models.family import TINY_HEAD_DIM, Settings

_HYBRID_LAYERS = 64  # the only number of layers with which llama.cpp uses sliding windows: that of the 32B model


def _assumed(settings: Settings) -> Settings:
    """llama.cpp has a sliding window of 4,096 tokens in three of four layers, or in none."""
    layers = settings["num_hidden_layers"]
    if layers != _HYBRID_LAYERS:
        return {"layer_types": ["full_attention"] * layers, "sliding_window": None}
    types = ["full_attention" if (layer + 1) % 4 == 0 else "sliding_attention" for layer in range(layers)]
    return {"layer_types": types, "sliding_window": 4096}


FAMILY = replace(
    olmo2.FAMILY,
    title="EXAONE 4",
    tiny={**TINY_HEAD_DIM, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    tiny_exported={"layer_types": ["full_attention", "full_attention"], "sliding_window": None},
    model_class="Exaone4ForCausalLM",
    gguf_fixed=_assumed,
    gguf_rope_types=("llama3",),
    gguf_needs_head=False,
)

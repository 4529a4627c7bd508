"""OLMo 3, which has sliding windows in three of four layers. llama.cpp calls it OLMo 2, too."""

from dataclasses import replace

from sansgpu.models.families import olmo2
from sansgpu.models.family import SLIDING_WINDOW, TINY_GQA, OlderRope, Settings, full_width_heads, rope_of, windows


def _assumed(settings: Settings) -> Settings:
    """llama.cpp always has a sliding window in three of four layers, and the same RoPE in all layers."""
    layers, rope = settings["num_hidden_layers"], rope_of(settings).get("full_attention")
    types = ["full_attention" if (layer + 1) % 4 == 0 else "sliding_attention" for layer in range(layers)]
    ropes = {} if rope is None else {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    return {**full_width_heads(settings), "layer_types": types, **ropes}


FAMILY = replace(
    olmo2.FAMILY,
    title="OLMo 3",
    tiny={**TINY_GQA, "num_hidden_layers": 4, "sliding_window": 32},
    model_class="Olmo3ForCausalLM",
    gguf_name="olmo2",
    gguf_recognizes=lambda metadata: bool(metadata.get("olmo2.attention.sliding_window")),
    gguf_settings=SLIDING_WINDOW,
    gguf_fixed=_assumed,
    gguf_layers=windows(4),
    gguf_local_rope=True,
    older_rope=OlderRope(),
)

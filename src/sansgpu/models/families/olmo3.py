"""OLMo 3, which has windows in three of four layers; llama.cpp computes it as OLMo 2 with windows."""

from dataclasses import replace

from sansgpu.models.families import olmo2
from sansgpu.models.family import SHARED, OlderRope, Settings, heads_as_wide_as_the_model, rope_of, windows


def _assumed(settings: Settings) -> Settings:
    """Returns what llama.cpp does not read: a window in all layers but each fourth, and equal RoPE in all layers."""
    layers, rope = settings["num_hidden_layers"], rope_of(settings).get("full_attention")
    types = ["full_attention" if (layer + 1) % 4 == 0 else "sliding_attention" for layer in range(layers)]
    ropes = {} if rope is None else {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    return {**heads_as_wide_as_the_model(settings), "layer_types": types, **ropes}


FAMILY = replace(
    olmo2.FAMILY,
    title="OLMo 3",
    tiny={**SHARED, "num_hidden_layers": 4, "sliding_window": 32},
    model_class="Olmo3ForCausalLM",
    gguf_name="olmo2",
    gguf_recognizes=lambda metadata: bool(metadata.get("olmo2.attention.sliding_window")),
    gguf_settings={"sliding_window": "{arch}.attention.sliding_window"},
    gguf_fixed=_assumed,
    gguf_layers=windows(4),
    gguf_local_rope=True,
    older_rope=OlderRope(),
)

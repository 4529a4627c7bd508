"""SmolLM3."""

from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.family import GROUPED, Settings


def every_fourth_without_rope(settings: Settings) -> Settings:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(settings["num_hidden_layers"])]}


FAMILY = replace(
    llama.FAMILY,
    title="SmolLM3",
    tiny={**GROUPED, "no_rope_layer_interval": 2},
    tiny_exported={"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    model_class="SmolLM3ForCausalLM",
    fixed={"use_sliding_window": False},
    gguf_fixed=every_fourth_without_rope,
    gguf_rope_types=(),
)

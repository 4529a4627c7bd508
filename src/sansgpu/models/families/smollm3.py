from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.family import TINY_HEAD_DIM, Settings


def _no_rope_in_fourth_layers(settings: Settings) -> Settings:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(settings["num_hidden_layers"])]}


FAMILY = replace(
    llama.FAMILY,
    title="SmolLM3",
    tiny={**TINY_HEAD_DIM, "no_rope_layer_interval": 2},
    tiny_exported={"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    model_class="SmolLM3ForCausalLM",
    fixed={"use_sliding_window": False},
    gguf_fixed=_no_rope_in_fourth_layers,
    gguf_rope_types=(),
)

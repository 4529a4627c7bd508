from dataclasses import replace

from sansgpu.models.families import llama, qwen3
from sansgpu.models.family import TINY_GQA

FAMILY = replace(
    llama.FAMILY,
    title="Arcee",
    tiny=TINY_GQA,
    model_class="ArceeForCausalLM",
    modules={name: key for name, key in llama.FAMILY.modules.items() if name != "blocks.{}.feed_forward.gate"},
    activations={},
    defaults=lambda settings: {**qwen3.common_defaults(settings), "hidden_act": "relu2"},
    gguf_activations=("relu2",),
    gguf_rope_types=(),
)

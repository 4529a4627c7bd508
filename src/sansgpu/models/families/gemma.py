from dataclasses import replace

from sansgpu.models.families import qwen3

FAMILY = replace(
    qwen3.FAMILY,
    title="Gemma",
    model_class="GemmaForCausalLM",
    activations={},
    defaults=lambda settings: {**qwen3.common_defaults(settings), "tie_word_embeddings": True},
    gguf_activations=("gelu_pytorch_tanh",),
    fixed={"tie_word_embeddings": True},
    gguf_norm_offset=1.0,
)

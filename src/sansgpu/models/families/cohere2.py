"""Command R7B and Command A, which have sliding windows in three of four layers, the only ones with RoPE."""

from dataclasses import replace

from sansgpu.models.families import cohere
from sansgpu.models.family import SLIDING_WINDOW, windows

FAMILY = replace(
    cohere.FAMILY,
    title="Command R7B",
    tiny={**cohere.FAMILY.tiny, "num_hidden_layers": 4, "sliding_window": 32},
    model_class="Cohere2ForCausalLM",
    fixed={"tie_word_embeddings": True},
    gguf_name=None,
    gguf_settings={**cohere.FAMILY.gguf_settings, **SLIDING_WINDOW},
    gguf_layers=windows(4),
    rope_theta=10_000.0,
)

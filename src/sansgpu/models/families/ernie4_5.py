"""ERNIE 4.5 without experts, which rotates pairs of adjacent elements of a head as llama.cpp does."""

from dataclasses import replace

from sansgpu.models.families import qwen3

FAMILY = replace(
    qwen3.FAMILY,
    title="ERNIE 4.5",
    model_class="Ernie4_5ForCausalLM",
    activations={},
    defaults=lambda settings: {
        **qwen3.common_defaults(settings),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    fixed={"use_bias": False},
    biases={},
    rope_theta=500_000.0,
)

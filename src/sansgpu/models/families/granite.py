"""Granite, which scales embeddings, scores, residual branches and logits."""

from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.family import TINY_GQA

FAMILY = replace(
    llama.FAMILY,
    title="Granite",
    tiny={
        **TINY_GQA, "embedding_multiplier": 2.0, "attention_multiplier": 0.5, "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    model_class="GraniteForCausalLM",
    gguf_settings={
        "attention_multiplier": "{arch}.attention.scale",
        "embedding_multiplier": "{arch}.embedding_scale",
        "residual_multiplier": "{arch}.residual_scale",
        "logits_scaling": "{arch}.logit_scale",
    },
    gguf_rope_types=(),
)  # fmt: skip

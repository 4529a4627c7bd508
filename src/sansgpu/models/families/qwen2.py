"""Qwen2 and Qwen2.5, which TransformerLM does not compute."""

from dataclasses import replace

from sansgpu.models.families import llama, qwen3
from sansgpu.models.family import SHARED, PreTokenizer

FAMILY = replace(
    qwen3.FAMILY,
    title="Qwen2",
    tiny={**SHARED, "tie_word_embeddings": True},
    model_class="Qwen2ForCausalLM",
    pre_tokenizers={"qwen2": PreTokenizer((llama.GPT4_SPLIT.replace("{1,3}", ""),))},
)

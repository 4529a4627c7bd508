from dataclasses import replace

from sansgpu.models.families import llama, qwen3
from sansgpu.models.family import TINY_GQA, PreTokenizer

SPLIT = PreTokenizer((llama.GPT4_SPLIT.replace("{1,3}", ""),))
FAMILY = replace(
    qwen3.FAMILY,
    title="Qwen2",
    tiny={**TINY_GQA, "tie_word_embeddings": True},
    model_class="Qwen2ForCausalLM",
    pre_tokenizers={"qwen2": SPLIT},
)

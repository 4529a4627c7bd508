"""Llama, and models with its architecture such as SmolLM2 and TinyLlama."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.gpt2 import SPLIT as GPT2_SPLIT
from sansgpu.models.family import PreTokenizer, RowOrder, Settings


def rotary_pairs_adjacent(name: str, settings: Settings) -> RowOrder | None:
    """llama.cpp's first RoPE kernel takes the two rows of a rotary pair from adjacent rows."""
    if name.endswith("q_proj.weight"):
        return RowOrder((settings["num_attention_heads"], 2, settings["head_dim"] // 2), 1)
    if name.endswith("k_proj.weight"):
        return RowOrder((settings["num_key_value_heads"], 2, settings["head_dim"] // 2), 1)
    return None


GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILY = replace(
    qwen3.FAMILY,
    title="Llama",
    model_class="LlamaForCausalLM",
    fixed={},
    biases={**qwen3.ATTENTION_BIAS, "mlp_bias": ("all",)},
    gguf_rope_types=("llama3",),
    gguf_rows=rotary_pairs_adjacent,
    pre_tokenizers={
        "llama-bpe": PreTokenizer((GPT4_SPLIT,), ignore_merges=True, begins=True),
        # sansgpu's own. llama.cpp has several names for GPT-4's pattern; this is the one without side effects.
        "dbrx": PreTokenizer((GPT4_SPLIT,)),
        "smollm": PreTokenizer((r"\p{N}", GPT2_SPLIT)),
    },
)

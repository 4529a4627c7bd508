"""Llama, and models with its architecture such as SmolLM2 and TinyLlama."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.gpt2 import SPLIT as GPT2_SPLIT
from sansgpu.models.family import PreTokenizer, RowOrder, Settings, adjacent_pairs


def adjacent_rotary_pairs(name: str, settings: Settings, rotated: int) -> RowOrder | None:
    """For this family, llama.cpp rotates pairs of adjacent elements of a head; transformers, those `rotated` / 2 apart.

    RoPE rotates the first `rotated` elements of each head.
    """
    heads = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    key = next((key for ending, key in heads.items() if name.endswith(ending)), None)
    return None if key is None else adjacent_pairs(settings[key], settings["head_dim"], rotated)


GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS_APART = PreTokenizer((r"\p{N}", GPT2_SPLIT))
FAMILY = replace(
    qwen3.FAMILY,
    title="Llama",
    model_class="LlamaForCausalLM",
    fixed={},
    biases={**qwen3.ATTENTION_BIAS, "mlp_bias": ("all",)},
    gguf_rope_types=("llama3",),
    gguf_rows=lambda name, settings: adjacent_rotary_pairs(name, settings, settings["head_dim"]),
    pre_tokenizers={
        "llama-bpe": PreTokenizer((GPT4_SPLIT,), ignore_merges=True, adds_bos=True),
        # The pattern of tokenizers that sansgpu trains. Of llama.cpp's names for it, this one has no side effects.
        "dbrx": PreTokenizer((GPT4_SPLIT,)),
        "smollm": DIGITS_APART,
    },
)

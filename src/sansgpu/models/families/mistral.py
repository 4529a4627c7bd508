from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.family import TINY_HEAD_DIM, PreTokenizer


def cased_split(number: str, word_end: str = "") -> str:
    """Returns the split pattern of GPT-4o and Mistral Nemo, whose words start with capitals and end in lower case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{word_end}|{start}{upper}+{lower}*{word_end}"
    return words + f"|{number}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


FAMILY = replace(
    llama.FAMILY,
    title="Mistral",
    tiny={**TINY_HEAD_DIM, "sliding_window": 32},
    tiny_exported={"sliding_window": None},
    model_class="MistralForCausalLM",
    biases={},
    gguf_name="llama",
    gguf_recognizes=lambda metadata: False,  # files do not tell it from Llama, which computes the same
    gguf_rope_types=(),
    gguf_no_window=True,
    pre_tokenizers={"tekken": PreTokenizer((cased_split(r"\p{N}"),), ignore_merges=True, adds_bos=True)},
)

"""Mistral."""

from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.family import GROUPED, PreTokenizer

# Words that begin with capitals and go on in lower case, as the tokenizers of GPT-4o and of Mistral Nemo divide text.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}" for upper, lower in ("*+", "+*")]
OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILY = replace(
    llama.FAMILY,
    title="Mistral",
    tiny={**GROUPED, "sliding_window": 32},
    tiny_exported={"sliding_window": None},
    model_class="MistralForCausalLM",
    biases={},
    gguf_name="llama",
    gguf_recognizes=lambda metadata: False,  # a file does not say that it is Mistral's, and Llama computes the same
    gguf_rope_types=(),
    gguf_no_window=True,
    pre_tokenizers={"tekken": PreTokenizer(("|".join(CASED) + r"|\p{N}" + OTHERS,), ignore_merges=True, begins=True)},
)

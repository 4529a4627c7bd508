"""Phi-3 and Phi-4."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.mistral import CASED, OTHERS
from sansgpu.models.family import SHARED, PreTokenizer, heads_as_wide_as_the_model

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
FAMILY = replace(
    qwen3.FAMILY,
    title="Phi-3",
    tiny=SHARED,
    model_class="Phi3ForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "blocks.{}.attention.qkv": "model.layers.{}.self_attn.qkv_proj",
        "blocks.{}.feed_forward.gate_up": "model.layers.{}.mlp.gate_up_proj",
    },
    fixed={},
    gguf_fixed=heads_as_wide_as_the_model,
    gguf_rope_types=("longrope",),
    gguf_no_window=True,
    pre_tokenizers={
        "gpt-4o": PreTokenizer(("|".join(f"{word}{_ENDING}" for word in CASED) + r"|\p{N}{1,3}" + OTHERS,))
    },
)

"""Phi-3 and Phi-4."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.mistral import cased_split
from sansgpu.models.family import TINY_GQA, PreTokenizer, full_width_heads

GATE_UP = "model.layers.{}.mlp.gate_up_proj"
FAMILY = replace(
    qwen3.FAMILY,
    title="Phi-3",
    tiny=TINY_GQA,
    model_class="Phi3ForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "blocks.{}.attention.qkv": "model.layers.{}.self_attn.qkv_proj",
        "blocks.{}.feed_forward.gate_up": GATE_UP,
    },
    fixed={},
    gguf_fixed=full_width_heads,
    gguf_rope_types=("longrope",),
    gguf_no_window=True,
    pre_tokenizers={"gpt-4o": PreTokenizer((cased_split(r"\p{N}{1,3}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),))},
)

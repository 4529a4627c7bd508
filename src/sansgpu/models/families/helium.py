"""Helium, which llama.cpp computes as Llama: both rotate pairs of adjacent elements of a head."""

from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.family import TINY_HEAD_DIM, full_width_heads

FAMILY = replace(
    llama.FAMILY,
    title="Helium",
    tiny=TINY_HEAD_DIM,
    model_class="HeliumForCausalLM",
    activations={},
    gguf_name="llama",
    gguf_recognizes=lambda metadata: False,
    gguf_fixed=full_width_heads,
    gguf_rope_types=(),
    gguf_rows=lambda name, settings: None,
    pre_tokenizers={},
)

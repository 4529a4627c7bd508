"""Nemotron and Minitron without recurrent layers."""

from dataclasses import replace

from sansgpu.models.families import arcee
from sansgpu.models.family import TINY_HEAD_DIM

FAMILY = replace(
    arcee.FAMILY,
    title="Nemotron",
    tiny=TINY_HEAD_DIM,
    model_class="NemotronForCausalLM",
    norm_eps=("norm_eps", "{arch}.attention.layer_norm_epsilon"),
    gguf_rows=lambda name, settings: None,
    gguf_norm_offset=1.0,
    gguf_needs_head=True,
)

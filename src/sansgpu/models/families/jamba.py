"""Jamba, which alternates Mamba layers with attention."""

from sansgpu.models.families import mamba
from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(
    title="Jamba",
    tiny={
        **TINY_GQA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    lora_excludes=mamba.FAMILY.lora_excludes,
)  # fmt: skip

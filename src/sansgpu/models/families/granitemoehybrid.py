"""Granite 4, in which Mamba 2 layers take the place of most attention layers."""

from sansgpu.models.families import granite, mamba
from sansgpu.models.family import Family

TINY_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
FAMILY = Family(
    title="Granite 4",
    tiny={
        **granite.FAMILY.tiny, **TINY_MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 96,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    lora_excludes=mamba.FAMILY.lora_excludes,
)  # fmt: skip

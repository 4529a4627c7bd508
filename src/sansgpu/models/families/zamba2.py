"""Zamba2, whose Mamba 2 layers are joined by attention that several layers share."""

from sansgpu.models.families import mamba
from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(
    title="Zamba2",
    tiny={
        **TINY_GQA, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "mamba_ngroups": 1,
        "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
    lora_excludes=mamba.FAMILY.lora_excludes,
)  # fmt: skip

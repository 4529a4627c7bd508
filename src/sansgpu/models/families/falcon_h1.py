from sansgpu.models.families import mamba
from sansgpu.models.family import TINY_HEAD_DIM, Family

FAMILY = Family(
    title="Falcon-H1",
    tiny={
        **TINY_HEAD_DIM, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 16,
    },
    lora_excludes=mamba.FAMILY.lora_excludes,
)  # fmt: skip

"""Falcon-H1, which has state space and attention layers."""

from sansgpu.models.families import mamba
from sansgpu.models.family import GROUPED, Family

FAMILY = Family(
    tiny={
        **GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    read_directly=mamba.READ_DIRECTLY,
)  # fmt: skip

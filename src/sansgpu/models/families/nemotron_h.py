"""Nemotron-H, each of whose blocks is a Mamba 2 layer, attention or a feed-forward network alone."""

from sansgpu.models.families import mamba
from sansgpu.models.family import TINY_HEAD_DIM, Family

FAMILY = Family(
    title="Nemotron-H",
    tiny={
        **TINY_HEAD_DIM, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
    },
    lora_excludes=mamba.FAMILY.lora_excludes,
)  # fmt: skip

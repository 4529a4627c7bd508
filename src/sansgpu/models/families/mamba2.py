from sansgpu.models.families import mamba
from sansgpu.models.family import Family

FAMILY = Family(
    title="Mamba 2",
    tiny={
        "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2,
        "chunk_size": 16,
    },
    lora_excludes=mamba.FAMILY.lora_excludes,
)  # fmt: skip

from sansgpu.models.families import lfm2
from sansgpu.models.family import Family

FAMILY = Family(
    title="LFM2-MoE",
    tiny={
        **lfm2.FAMILY.tiny, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
)  # fmt: skip

from sansgpu.models.families import qwen3_5_text
from sansgpu.models.family import Family

FAMILY = Family(
    title="Qwen3-Next",
    tiny={
        **qwen3_5_text.TINY_DELTA_NET, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
)  # fmt: skip

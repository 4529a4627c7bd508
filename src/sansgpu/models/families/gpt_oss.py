from sansgpu.models.family import TINY_HEAD_DIM, Family

FAMILY = Family(
    title="gpt-oss",
    tiny={
        **TINY_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
)  # fmt: skip

from sansgpu.models.family import TINY_HEAD_DIM, Family

FAMILY = Family(
    title="LFM3",
    tiny={
        **TINY_HEAD_DIM, "num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"],
        "sliding_window": 16,
    },
)  # fmt: skip

"""The text encoder inside EmbeddingGemma 2."""

from sansgpu.models.family import TINY_HEAD_DIM, Family

FAMILY = Family(
    title="EmbeddingGemma 2",
    is_encoder=True,
    tiny={
        **TINY_HEAD_DIM, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        "global_head_dim": 32, "hidden_size_per_layer_input": 16, "embedding_dim": 96,
    },
)  # fmt: skip

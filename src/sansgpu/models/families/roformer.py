from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="RoFormer",
    is_encoder=True,
    tiny={**TINY_MHA, "embedding_size": 32},
)

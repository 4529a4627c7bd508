from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="BigBird",
    is_encoder=True,
    tiny={**TINY_MHA, "block_size": 16},
)

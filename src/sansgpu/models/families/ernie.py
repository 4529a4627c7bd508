from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="ERNIE",
    is_encoder=True,
    tiny=TINY_MHA,
)

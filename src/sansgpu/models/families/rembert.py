from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="RemBERT",
    is_encoder=True,
    tiny={**TINY_MHA, "input_embedding_size": 32, "output_embedding_size": 48},
)

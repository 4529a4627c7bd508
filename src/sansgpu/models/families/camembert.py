from sansgpu.models.family import TINY_CONTEXT, TINY_MHA, Family

FAMILY = Family(
    title="CamemBERT",
    is_encoder=True,
    tiny={**TINY_MHA, "max_position_embeddings": TINY_CONTEXT + 2, "pad_token_id": 1},
)

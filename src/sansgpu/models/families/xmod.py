from sansgpu.models.family import TINY_CONTEXT, TINY_MHA, Family

FAMILY = Family(
    title="X-MOD",
    is_encoder=True,
    tiny={
        **TINY_MHA,
        "max_position_embeddings": TINY_CONTEXT + 2,
        "pad_token_id": 1,
        "languages": ["en_XX"],
        "default_language": "en_XX",
    },
)

"""RoBERTa."""

from sansgpu.models.family import CONTEXT, LAYERED, Family

FAMILY = Family(
    title="RoBERTa",
    is_encoder=True,
    tiny={**LAYERED, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1},  # position ids start after it
    gguf_name="bert",
)

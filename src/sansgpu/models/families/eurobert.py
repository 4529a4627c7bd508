"""EuroBERT."""

from sansgpu.models.family import SHARED, Family

FAMILY = Family(
    title="EuroBERT",
    is_encoder=True,
    # The defaults of its special tokens exceed a small vocabulary.
    tiny={**SHARED, "bos_token_id": None, "eos_token_id": None, "mask_token_id": 0},
)

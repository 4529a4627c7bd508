from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(
    title="EuroBERT",
    is_encoder=True,
    # The defaults of its special tokens exceed a small vocabulary.
    tiny={**TINY_GQA, "bos_token_id": None, "eos_token_id": None, "mask_token_id": 0},
)

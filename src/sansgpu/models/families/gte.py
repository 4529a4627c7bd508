from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(title="GTE", is_encoder=True, tiny=TINY_MHA)

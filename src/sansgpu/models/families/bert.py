from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(title="BERT", is_encoder=True, tiny=TINY_MHA)

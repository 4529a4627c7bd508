from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(title="nanochat", tiny=TINY_GQA)

from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(title="DiffLlama", tiny=TINY_GQA)

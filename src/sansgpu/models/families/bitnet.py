from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(title="BitNet", tiny=TINY_GQA)

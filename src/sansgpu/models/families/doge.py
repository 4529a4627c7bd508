from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(title="Doge", tiny=TINY_GQA)

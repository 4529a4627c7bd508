from sansgpu.models.families import gpt_neox
from sansgpu.models.family import Family

FAMILY = Family(older_rope=gpt_neox.FAMILY.older_rope)

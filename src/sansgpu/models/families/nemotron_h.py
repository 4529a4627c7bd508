from sansgpu.models.families import mamba
from sansgpu.models.family import Family

FAMILY = Family(lora_excludes=mamba.FAMILY.lora_excludes)

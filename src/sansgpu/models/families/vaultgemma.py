from sansgpu.models.families import gemma2
from sansgpu.models.family import Family

FAMILY = Family(title="VaultGemma", tiny=gemma2.FAMILY.tiny)

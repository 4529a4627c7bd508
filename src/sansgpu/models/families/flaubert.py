from sansgpu.models.families import xlm
from sansgpu.models.family import Family

FAMILY = Family(older_settings=xlm.FAMILY.older_settings)

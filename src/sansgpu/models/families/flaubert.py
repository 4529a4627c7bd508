from dataclasses import replace

from sansgpu.models.families import xlm

FAMILY = replace(xlm.FAMILY, title="FlauBERT")

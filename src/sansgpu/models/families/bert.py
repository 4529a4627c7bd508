"""BERT."""

from sansgpu.models.family import LAYERED, Family

FAMILY = Family(title="BERT", is_encoder=True, tiny=LAYERED)

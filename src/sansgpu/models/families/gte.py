"""GTE."""

from sansgpu.models.family import LAYERED, Family

FAMILY = Family(title="GTE", is_encoder=True, tiny=LAYERED)

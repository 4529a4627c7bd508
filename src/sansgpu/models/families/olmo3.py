"""OLMo 3."""

from sansgpu.models.family import Family, OlderRope

FAMILY = Family(older_rope=OlderRope())

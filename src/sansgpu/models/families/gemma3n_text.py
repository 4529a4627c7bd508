"""Gemma 3n, the part that reads and writes text."""

from sansgpu.models.families import gemma3_text
from sansgpu.models.family import Family

FAMILY = Family(older_rope=gemma3_text.FAMILY.older_rope)

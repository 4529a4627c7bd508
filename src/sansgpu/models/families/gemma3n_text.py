"""The language model inside Gemma 3n."""

from sansgpu.models.families import gemma3_text
from sansgpu.models.family import Family

FAMILY = Family(older_rope=gemma3_text.FAMILY.older_rope)

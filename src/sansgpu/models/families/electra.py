"""ELECTRA."""

from sansgpu.models.family import LAYERED, Family

FAMILY = Family(title="ELECTRA", is_encoder=True, tiny={**LAYERED, "embedding_size": 32})

"""Jina Embeddings v3."""

from sansgpu.models.family import LAYERED, Family

FAMILY = Family(title="Jina Embeddings v3", is_encoder=True, tiny=LAYERED)

"""NomicBERT."""

from sansgpu.models.family import LAYERED, Family

FAMILY = Family(title="NomicBERT", is_encoder=True, tiny=LAYERED, gguf_name="nomic-bert")

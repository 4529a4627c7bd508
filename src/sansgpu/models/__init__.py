"""Model architectures, their file formats and what they cost to train."""

from sansgpu.models.decoder import KeyValueCache, TransformerLM

__all__ = ["KeyValueCache", "TransformerLM"]

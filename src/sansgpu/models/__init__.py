"""Tensors -> tensors."""

from sansgpu.models.decoder import KeyValueCache, TransformerLM

__all__ = ["KeyValueCache", "TransformerLM"]

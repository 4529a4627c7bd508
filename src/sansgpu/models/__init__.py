"""Model architectures, their file formats and what they cost to train."""

from sansgpu.models.decoder import CausalLMOutput, KeyValueCache, TransformerLM

__all__ = ["CausalLMOutput", "KeyValueCache", "TransformerLM"]

"""The tokenizers, by a short name."""

from sansgpu.data.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, load_tokenizer

__all__ = ["BPETokenizer", "CharTokenizer", "Tokenizer", "load_tokenizer"]

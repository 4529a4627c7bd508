"""Chooses the size of the embedding for a tokenizer."""

from __future__ import annotations

from sansgpu.config import Config, ConfigError

EXPECTED_CHARACTERS = 512  # vocabulary of a character tokenizer, including the 256 bytes
VOCABULARY_MULTIPLE = 64  # embedding rows are padded to a multiple of this for fast matmuls


def with_vocabulary_of(config: Config, tokens: int) -> Config:
    """Sets model.vocab_size for a tokenizer of `tokens` tokens. Raises ConfigError if it is set but too small."""
    size = config.model.vocab_size
    if size is None:
        return _sized(config, tokens)
    if size < tokens:
        remedy = f"set data.vocab_size to {size} as well, or leave model.vocab_size out"
        if config.data.tokenizer != "bpe" or tokens > config.data.vocab_size:  # the tokenizer's size is not up to us
            remedy = f"raise it to {tokens} or leave it out"
        raise ConfigError(f"model.vocab_size {size} is smaller than the tokenizer's {tokens}; {remedy}.")
    return config


def with_expected_vocabulary(config: Config) -> Config:
    """Sets model.vocab_size to an estimate that does not need the data."""
    if config.model.vocab_size:
        return config
    return _sized(config, EXPECTED_CHARACTERS if config.data.tokenizer == "char" else config.data.vocab_size)


def _sized(config: Config, vocabulary: int) -> Config:
    size = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})

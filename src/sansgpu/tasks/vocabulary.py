"""How large an embedding is: as the tokenizer needs, in rows that products like."""

from __future__ import annotations

from sansgpu.config import Config, ConfigError

EXPECTED_CHARACTERS = 512  # tokens of a text cut into characters, with the 256 bytes
VOCABULARY_MULTIPLE = 64  # rows of the embedding are padded to this, which matmuls like


def with_vocabulary_of(config: Config, tokens: int) -> Config:
    """The configuration with an embedding for so many tokens. Raises ConfigError where it has a smaller one."""
    size = config.model.vocab_size
    if size is None:
        return _sized(config, tokens)
    if size < tokens:
        raise ConfigError(
            f"model.vocab_size {size} is smaller than the tokenizer's {tokens}; raise it or leave it out."
        )
    return config


def with_expected_vocabulary(config: Config) -> Config:
    """The configuration with the vocabulary that the data most likely gives: an estimate, made without reading it."""
    if config.model.vocab_size:
        return config
    return _sized(config, EXPECTED_CHARACTERS if config.data.tokenizer == "char" else config.data.vocab_size)


def _sized(config: Config, vocabulary: int) -> Config:
    size = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})

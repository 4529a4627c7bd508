"""A scaling law: expected loss by model size and training tokens, with diminishing value of repeated text."""

from __future__ import annotations

import math

# Bits per byte = floor + size term + data term, the form of Hoffmann et al. (arXiv 2203.15556). Fitted to runs of this
# recipe with 1.9M to 17M parameters and 1 to 10M tokens of English (docs/lab-notes.md). The balance of the terms tells
# which model size to choose; the sum does not predict the loss on other text.
_FLOOR = 0.93
_SIZE, _SIZE_POWER = 0.224, 0.65
_DATA, _DATA_POWER = 0.65, 0.5
_REPEATS = 15.4  # decay constant of the value of repeated epochs (Muennighoff et al., arXiv 2305.16264)
MAX_EPOCHS = 16  # the most epochs of a proposed run


def effective_tokens(tokens: float, unique: float) -> float:
    """Returns the number of fresh tokens with the same value as `tokens` drawn from a text of `unique` tokens."""
    if tokens <= unique:
        return tokens
    return unique * (1 + _REPEATS * (1 - math.exp(-(tokens / unique - 1) / _REPEATS)))


def expected_bits_per_byte(parameters: float, tokens: float, unique: float) -> float:
    """Returns the estimated bits per byte after training; comparable only between models on the same text."""
    size = _SIZE * math.pow(parameters / 1e6, -_SIZE_POWER)
    return _FLOOR + size + _DATA * math.pow(effective_tokens(tokens, unique) / 1e6, -_DATA_POWER)

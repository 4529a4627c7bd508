"""Which model is best for the time there is: loss by size and tokens, with repeated text counting for less."""

from __future__ import annotations

import math

# Bits per byte = floor + size term + data term, the form of Hoffmann et al. (arXiv 2203.15556). Fitted to runs of this
# recipe with 1.9M to 17M parameters and 1 to 10M tokens of English (docs/lab-notes.md): where terms balance says
# which model to take, the sum is no promise for other text.
_FLOOR = 0.93
_SIZE, _SIZE_POWER = 0.224, 0.65
_DATA, _DATA_POWER = 0.65, 0.5
_REPEATS = 15.4  # epochs after which repeating text has lost most of its worth (Muennighoff et al., arXiv 2305.16264)
MOST_EPOCHS = 16  # of a proposal


def worth_of_tokens(tokens: float, unique: float) -> float:
    """Fresh tokens that are worth as much as `tokens` drawn from a text of `unique`."""
    if tokens <= unique:
        return tokens
    return unique * (1 + _REPEATS * (1 - math.exp(-(tokens / unique - 1) / _REPEATS)))


def expected_bits_per_byte(parameters: float, tokens: float, unique: float) -> float:
    """Of a model after a run; comparable between models on one text."""
    size = _SIZE * math.pow(parameters / 1e6, -_SIZE_POWER)
    return _FLOOR + size + _DATA * math.pow(worth_of_tokens(tokens, unique) / 1e6, -_DATA_POWER)

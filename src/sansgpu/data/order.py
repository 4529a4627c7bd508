"""Random generators that depend only on a seed and a purpose, and the shuffled order of examples."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sansgpu.config import derive_seed
from sansgpu.config.training import TrainingConfig


def generator(seed: int, *purpose: int | str) -> np.random.Generator:
    """Returns a random generator for one purpose; see `derive_seed`."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *purpose)))


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Returns the number of steps per epoch, counting a smaller last batch."""
    return -(-examples // batch_size)


def step_limits(training: TrainingConfig, steps_per_epoch: float, tokens_per_epoch: int) -> list[float]:
    """Returns the steps after which max_steps, max_tokens and num_epochs are reached, for those that are set."""
    limits = (
        training.max_steps,
        training.max_tokens and training.max_tokens * steps_per_epoch / tokens_per_epoch,
        training.num_epochs and training.num_epochs * steps_per_epoch,
    )
    return [limit for limit in limits if limit is not None]


def batch_indices(seed: int, step: int, examples: int, batch_size: int) -> np.ndarray:
    """Returns the indices of a step's examples. Each epoch has its own permutation; its last batch may be smaller."""
    epoch, index = divmod(step, steps_per_epoch(examples, batch_size))
    return _permutation(seed, epoch, examples)[index * batch_size : (index + 1) * batch_size]


@lru_cache(maxsize=2)  # the current epoch, and the next one while batches are prefetched
def _permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
    return generator(seed, "shuffle", epoch).permutation(examples)

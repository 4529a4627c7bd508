"""Randomness as a pure function of what it is for; nothing is drawn from left-over state."""

from __future__ import annotations

import hashlib


def fold_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for one purpose, e.g. `fold_seed(seed, "dropout", step, micro_batch, rank)`.

    Folding by a hash, as jax.random.fold_in does, keeps streams independent where sums of small integers collide.
    """
    text = repr((seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

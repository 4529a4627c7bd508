"""Derives seeds from their purpose, so that no result depends on the state of a shared generator."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: int | str) -> int:
    """Returns a 63-bit seed for one purpose, e.g. `derive_seed(seed, "dropout", step, micro_batch, rank)`.

    Hashing, as in jax.random.fold_in, keeps streams independent. Sums of small integers would collide.
    """
    text = repr((seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

"""A packed cache returns the keys and values that a plain cache of the same sequences returns."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.packed_cache import PackedCache, PlainCache

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SLOTS, LENGTH = 3, 150
PIECES = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 70)), min_size=1, max_size=6)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PIECES, st.integers(1, 3), st.integers(1, 20), DTYPES, st.integers(0, 99))
def test_stored_and_moved_tokens_are_read_as_they_were(
    native_kernels: str, pieces: list[tuple[int, int]], heads: int, half: int, dtype: torch.dtype, seed: int
) -> None:
    generator, dim = torch.Generator().manual_seed(seed), 2 * half
    caches = [kind(SLOTS, LENGTH, heads, dim, dtype) for kind in (PackedCache, PlainCache)]
    lengths = [0] * SLOTS
    for slot, wanted in pieces:
        count = min(wanted, LENGTH - lengths[slot])
        if count == 0:
            continue
        places = torch.arange(lengths[slot], lengths[slot] + count)
        keys, values = (torch.randn(count, heads, dim, generator=generator) for _ in "kv")
        for cache in caches:
            cache.store(torch.full((count,), slot), places, keys.to(dtype), values.to(dtype))
        lengths[slot] += count
    last = max(slot for slot, length in enumerate(lengths) if length)
    for cache in caches:
        cache.move(0, last, lengths[last])
    lengths[0] = lengths[last]
    for slot, length in enumerate(lengths):
        packed, plain = (cache.read(slice(slot, slot + 1), length) for cache in caches)
        assert all(torch.equal(one, other) for one, other in zip(packed, plain, strict=True))


def test_a_token_without_a_place_is_refused(native_kernels: str) -> None:
    cache, state = PackedCache(2, 10, 1, 4, torch.float32), torch.zeros(1, 1, 4)
    for slot, position in ((2, 0), (0, cache.length)):
        with pytest.raises(ValueError, match="2 slots of 64 tokens"):
            cache.store(torch.tensor([slot]), torch.tensor([position]), state, state)

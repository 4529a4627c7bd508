"""Attention of queries to ranges of keys that are empty, reversed, or at the end of the keys, forward and backward."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.attention import Decay, attention, reference_attention, visible_keys
from tests.kernels.test_kernels import assert_near, with_gradients

RANDOM = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
BLOCK = 64  # queries per block of the kernel, which rounds ranges of keys to blocks of this size


def odd_ranges(queries: int, keys: int, generator: torch.Generator) -> torch.Tensor:
    """Draws ranges (2, T, 2), many of them reversed or empty; some whole blocks of queries see no key."""
    ranges = torch.randint(0, keys + 1, (2, queries, 2), generator=generator, dtype=torch.int32)
    kind = torch.randint(0, 4, (2, queries, 1), generator=generator)
    blind = torch.rand(2, -(-queries // BLOCK), generator=generator) < 0.3
    kind[blind.repeat_interleave(BLOCK, dim=1)[:, :queries]] = 0
    some = torch.stack((ranges.amin(-1), ranges.amax(-1)), dim=-1)
    return torch.where(kind == 0, ranges[..., :1].expand_as(ranges), torch.where(kind == 1, ranges, some)).contiguous()


@RANDOM
@given(st.integers(1, 200), st.integers(1, 300), DTYPES, st.sampled_from([0, 0.1, 0.9]), st.integers(0, 99))
def test_attention(kernels: str, queries: int, keys: int, dtype: torch.dtype, dropout: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    ranges = odd_ranges(queries, keys, generator)
    ours = with_gradients(inputs, lambda q, k, v: attention(q, k, v, ranges, dropout), weight)
    blind = ~visible_keys(ranges, keys).any(-1).expand(2, 4, queries)
    assert not ours[0][blind].any()
    assert not ours[1][blind].any()
    assert all(bool(tensor.isfinite().all()) for tensor in ours)
    if not dropout:
        wide = [t.double() for t in inputs]
        exact = with_gradients(wide, lambda q, k, v: seen_by_reference(q, k, v, ranges), weight)
        assert_near(ours, exact, dtype)


def seen_by_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    """Computes the reference for queries that see keys, and zeros for others: softmax over nothing has no gradient."""
    sees = visible_keys(ranges, k.shape[2]).any(-1).transpose(1, 2)  # (B, T, 1)
    whole = torch.tensor([0, k.shape[2]], dtype=torch.int32)
    out = reference_attention(q, k, v, torch.where(sees, ranges, whole))
    return out * sees[:, None]


@RANDOM
@given(st.integers(1, 300), DTYPES, st.sampled_from([0, 0.5]), st.booleans(), st.integers(0, 99))
def test_attention_between_nodes(
    kernels: str, time: int, dtype: torch.dtype, dropout: float, added: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(2, 2, time, 16, generator=generator).to(dtype) for _ in range(3)]
    inputs.append(torch.rand(2, 12, generator=generator))
    weight = torch.randn(2, 2, time, 16, generator=generator, dtype=torch.float64)
    nodes = torch.randint(0, 5, (2, time, 2), generator=generator, dtype=torch.int32)
    ranges = odd_ranges(time, time, generator)
    ours = with_gradients(
        inputs, lambda q, k, v, table: attention(q, k, v, ranges, dropout, Decay(nodes, table, added)), weight
    )
    blind = ~visible_keys(ranges, time).any(-1).expand(2, 2, time)
    assert not ours[0][blind].any()
    assert not ours[1][blind].any()
    assert all(bool(tensor.isfinite().all()) for tensor in ours)

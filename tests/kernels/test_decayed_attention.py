"""Graph attention with distance decay: distances are compared with a search, kernels with plain float64 code."""

from collections import deque

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.attention import (
    Decay,
    attention,
    bidirectional_ranges,
    causal_ranges,
    node_distances,
    reference_attention,
)
from tests.kernels.test_kernels import assert_near, with_gradients

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
APART = 1000  # difference of root numbers between graphs of a row; no decay table is that long


def steps_from(start: tuple[int, int], roots: int, leaves: int) -> dict[tuple[int, int], int]:
    """Returns distances from one node of the whole graph to all others, by breadth-first search."""
    steps, waiting = {start: 0}, deque([start])
    while waiting:
        root, slot = here = waiting.popleft()
        if slot == 0:
            beside = [(root - 1, 0), (root + 1, 0), *((root, 1 + leaf) for leaf in range(leaves))]
        else:
            beside = [(root, 0), *((root, other) for other in (slot - 1, slot + 1) if other > 0)]
        for root, slot in beside:
            if 0 <= root < roots and slot <= leaves and (root, slot) not in steps:
                steps[root, slot] = steps[here] + 1
                waiting.append((root, slot))
    return steps


@given(st.integers(1, 6), st.integers(0, 5), st.data())
def test_distances_are_the_edges_of_the_shortest_way(roots: int, leaves: int, data: st.DataObject) -> None:
    every = [(root, slot) for root in range(roots) for slot in range(leaves + 1)]
    some = st.lists(st.sampled_from(every), min_size=1, max_size=12)
    nodes, others = data.draw(some), data.draw(some)
    expected = [[steps_from(node, roots, leaves)[other] for other in others] for node in nodes]
    asked = torch.tensor([nodes], dtype=torch.int32)
    assert node_distances(asked, torch.tensor([others], dtype=torch.int32)).tolist() == [expected]
    assert torch.equal(node_distances(asked), node_distances(asked, asked))


def random_row(graphs: int, roots: int, slots: int, generator: torch.Generator) -> tuple[list[list[int]], list[int]]:
    """Draws shuffled nodes of several graphs with random leaves; returns them and the graph of each node."""
    nodes, documents = [], []
    for graph in range(graphs):
        leaf = torch.rand(roots, slots, generator=generator) < torch.rand((), generator=generator)
        here = [[root, 0] for root in range(roots)] + [[root, 1 + slot] for root, slot in leaf.nonzero().tolist()]
        here = [here[i] for i in torch.randperm(len(here), generator=generator).tolist()]
        nodes += [[APART * graph + root, slot] for root, slot in here]
        documents += [graph] * len(here)
    return nodes, documents


def random_graphs(
    batch: int, graphs: int, roots: int, slots: int, causal: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns nodes (B, T, 2) and ranges (B, T, 2); shorter rows are padded with queries that see no key."""
    rows = [random_row(graphs, roots, slots, generator) for _ in range(batch)]
    longest = max(len(nodes) for nodes, _ in rows)
    nodes = torch.tensor([nodes + [[0, 0]] * (longest - len(nodes)) for nodes, _ in rows], dtype=torch.int32)
    documents = torch.tensor([documents + [-1] * (longest - len(documents)) for _, documents in rows])
    ranges = (causal_ranges if causal else bidirectional_ranges)(documents)
    return nodes, ranges * (documents >= 0)[..., None].int()


def random_inputs(
    batch: int, heads: int, kv_heads: int, time: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> list[torch.Tensor]:
    """Returns random q (B, heads, T, dim), and k and v (B, kv_heads, T, dim)."""
    shapes = [(batch, count, time, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor, nodes: torch.Tensor, table: torch.Tensor,
    added: bool,
) -> torch.Tensor:  # fmt: skip
    """Computes attention by its definition, query by query over the keys in range."""
    rows = []
    for b, example_ranges in enumerate(ranges.tolist()):
        for i, (first, end) in enumerate(example_ranges):
            keys, values = (t[b, :, first:end].repeat_interleave(q.shape[1] // k.shape[1], dim=0) for t in (k, v))
            scores = (keys * q[b, :, i, None]).sum(-1) / q.shape[-1] ** 0.5
            entries = table[:, node_distances(nodes[b : b + 1, i : i + 1], nodes[b : b + 1, first:end])[0, 0]]
            weights = torch.softmax(scores + entries if added else scores * entries, dim=-1)
            rows.append((weights[..., None] * values).sum(1))
    return torch.stack(rows).unflatten(0, ranges.shape[:2]).transpose(1, 2)


@settings(max_examples=15)
@given(st.integers(1, 2), st.integers(1, 2), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 99))
def test_the_reference_is_the_definition(
    groups: int, graphs: int, roots: int, causal: bool, added: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes, ranges = random_graphs(2, graphs, roots, 2, causal, generator)
    inputs = random_inputs(2, 2 * groups, 2, nodes.shape[1], 4, torch.float64, generator)
    table = torch.randn(2 * groups, roots + 2, generator=generator, dtype=torch.float64)
    weight = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
    reference = with_gradients(
        [*inputs, table], lambda q, k, v, t: reference_attention(q, k, v, ranges, None, Decay(nodes, t, added)), weight
    )
    definition = with_gradients([*inputs, table], lambda q, k, v, t: by_hand(q, k, v, ranges, nodes, t, added), weight)
    assert_near(reference, definition, torch.float64)


def assert_exact(
    leaves: list[torch.Tensor], ranges: torch.Tensor, nodes: torch.Tensor, added: bool, weight: torch.Tensor,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Compares output and gradients of q, k, v and the table with the reference in float64."""
    ours = with_gradients(leaves, lambda q, k, v, t: attention(q, k, v, ranges, 0.0, Decay(nodes, t, added)), weight)
    exact = with_gradients(
        [t.double() for t in leaves],
        lambda q, k, v, t: reference_attention(q, k, v, ranges, None, Decay(nodes, t, added)),
        weight,
    )
    assert len(ours) == 5
    assert_near(ours, exact, dtype)


@RANDOM
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 35), st.integers(0, 4),
    st.sampled_from([2, 16, 64]), st.booleans(), st.booleans(), DTYPES, st.integers(0, 99),
)  # fmt: skip
@example(1, 1, 2, 1, 128, 3, 16, False, False, torch.bfloat16, 0)  # several blocks of queries and of keys
@example(1, 2, 1, 2, 150, 3, 8, False, True, torch.float32, 0)
def test_decayed_attention(
    kernels: str, batch: int, groups: int, kv_heads: int, graphs: int, roots: int, slots: int, dim: int, causal: bool,
    added: bool, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    nodes, ranges = random_graphs(batch, graphs, roots, slots, causal, generator)
    heads, time = groups * kv_heads, nodes.shape[1]
    inputs = random_inputs(batch, heads, kv_heads, time, dim, dtype, generator)
    table = torch.randn(heads, roots + 2, generator=generator).to(wide(dtype))
    weight = torch.randn(batch, heads, time, dim, generator=generator, dtype=torch.float64)
    assert_exact([*inputs, table], ranges, nodes, added, weight, dtype)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_drops_the_same_weights_forward_and_backward(kernels: str, dtype: torch.dtype, added: bool) -> None:
    rate, generator = 0.3, torch.Generator().manual_seed(0)
    nodes, ranges = random_graphs(2, 2, 25, 3, False, generator)
    time = nodes.shape[1] // 2 * 2  # even, because it is also the head dimension here
    nodes, ranges = nodes[:, :time], ranges[:, :time].clamp(max=time)
    q, k, v = random_inputs(2, 3, 3, time, time, dtype, generator)
    weight = torch.randn(2, 3, time, time, generator=generator).to(dtype)
    table = torch.rand(3, 27, generator=generator)

    def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attention(q, k, v, ranges, rate, Decay(nodes, table, added))

    identity = torch.eye(time, dtype=dtype).expand(2, 3, time, time)
    weights = reference_attention(
        q.double(), k.double(), identity.double(), ranges, None, Decay(nodes, table.double(), added)
    )
    kept = dropped(q, k, identity, table) != 0  # the output for one-hot values is the weights themselves
    assert kept[weights > 1e-6].double().mean() == pytest.approx(1 - rate, abs=0.02)
    factor = kept.double() / (1 - rate)
    ours = with_gradients([q, k, v, table], dropped, weight)
    exact = with_gradients(
        [t.double() for t in (q, k, v, table)],
        lambda q, k, v, t: reference_attention(q, k, v, ranges, factor, Decay(nodes, t, added)),
        weight,
    )
    assert_near(ours, exact, dtype)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_attends_to_nothing(kernels: str, dtype: torch.dtype, added: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = torch.tensor([[[0, 0], [1, 0], [0, 1], [0, 0], [-7, 99]]], dtype=torch.int32)[:, :4]
    ranges = torch.tensor([[[0, 3], [0, 3], [0, 3], [4, 2]]], dtype=torch.int32)
    leaves = [t.requires_grad_() for t in random_inputs(1, 2, 2, 4, 8, dtype, generator)]
    table = torch.rand(2, 3, generator=generator, requires_grad=True)
    out = attention(*leaves, ranges, 0.0, Decay(nodes, table, added))
    out.sum().backward()
    assert torch.equal(out[:, :, 3], torch.zeros(1, 2, 8, dtype=dtype))
    for leaf in leaves:
        assert leaf.grad is not None
        assert torch.equal(leaf.grad[:, :, 3], torch.zeros(1, 2, 8, dtype=dtype))
    assert all(bool(t.grad.isfinite().all()) for t in (*leaves, table) if t.grad is not None)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("size", [30.0, -30.0])
def test_entries_of_any_size_stay_exact(kernels: str, added: bool, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    nodes, ranges = random_graphs(1, 2, 20, 3, False, generator)
    inputs = random_inputs(1, 2, 2, nodes.shape[1], 16, torch.float32, generator)
    table = torch.randn(2, 22, generator=generator)
    table[:, ::2] = size
    weight = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
    assert_exact([*inputs, table], ranges, nodes, added, weight, torch.float32)


def test_a_distance_beyond_the_table_is_refused_if_attention_uses_it(kernels: str) -> None:
    q, k, v = random_inputs(1, 2, 2, 4, 8, torch.float32, torch.Generator().manual_seed(0))
    nodes = torch.tensor([[[0, 0], [1, 0], [5, 0], [5, 1]]], dtype=torch.int32)
    apart = bidirectional_ranges(torch.tensor([[0, 0, 1, 1]]))
    assert bool(attention(q, k, v, apart, 0.0, Decay(nodes, torch.ones(2, 2))).isfinite().all())
    with pytest.raises(IndexError, match="out of"):
        attention(q, k, v, apart, 0.0, Decay(nodes, torch.ones(2, 1)))
    with pytest.raises(IndexError, match="out of"):
        attention(q, k, v, bidirectional_ranges(torch.zeros(1, 4)), 0.0, Decay(nodes, torch.ones(2, 6)))


def test_what_the_kernel_cannot_take_is_refused(native_kernels: str) -> None:
    q, k, v = random_inputs(1, 2, 2, 4, 8, torch.float32, torch.Generator().manual_seed(0))
    nodes, ranges = torch.zeros(1, 4, 2, dtype=torch.int32), bidirectional_ranges(torch.zeros(1, 4))
    for root, slot in ((-1, 0), (0, -1), (1 << 20, 0), (0, 1 << 12)):
        wrong = torch.tensor([root, slot], dtype=torch.int32).expand(1, 4, 2)
        with pytest.raises(IndexError, match=r"node .* is out of bounds"):
            attention(q, k, v, ranges, 0.0, Decay(wrong, torch.ones(2, 3)))
    with pytest.raises(RuntimeError, match="expects contiguous int32 nodes"):
        attention(q, k, v, ranges, 0.0, Decay(nodes[:, :3], torch.ones(2, 3)))
    for table in (torch.ones(3, 3), torch.ones(2, 0), torch.ones(3)):
        with pytest.raises(RuntimeError, match="expects a contiguous fp32 decay table"):
            attention(q, k, v, ranges, 0.0, Decay(nodes, table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_nothing(native_kernels: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    nodes, ranges = random_graphs(3, 2, 30, 3, False, generator)
    inputs = random_inputs(3, 6, 3, nodes.shape[1], 16, dtype, generator)
    table = torch.rand(6, 32, generator=generator)
    weight = torch.randn(inputs[0].shape, generator=generator)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        decayed = with_gradients(
            [*inputs, table], lambda q, k, v, t: attention(q, k, v, ranges, 0.0, Decay(nodes, t)), weight
        )
        results.append(decayed)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

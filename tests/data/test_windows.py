"""Documents -> splits, windows, order: every token learned from once, none seen from another document."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.data.batch import IGNORE, Batch
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.pack import PackedWindows, PaddedWindows, make_windows
from sansgpu.data.prefetch import Prefetcher
from sansgpu.data.shards import DOCUMENT, TokenStore
from sansgpu.data.split import TokenRanges, all_documents, split_documents

END = 0
DOCUMENTS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=30), min_size=1, max_size=12)


def store_of(documents: list[list[int]]) -> TokenStore:
    """As build_store writes it: each document begins with END."""
    tokens = np.array([t for d in documents for t in [END, *d]], np.uint16)
    ends = np.cumsum([len(d) + 1 for d in documents])
    hashes = [abs(hash(tuple(d))) for d in documents]
    return TokenStore("test", tokens, np.array(list(zip(ends, hashes, strict=True)), dtype=DOCUMENT))


def learned(windows: PackedWindows | PaddedWindows) -> list[tuple[int, int]]:
    """(input, target) of every place that is learned from, in order."""
    batch = windows.batch(np.arange(len(windows)))
    kept = batch.targets != IGNORE
    return list(zip(batch.inputs[kept].tolist(), batch.targets[kept].tolist(), strict=True))


@settings(deadline=None)
@given(DOCUMENTS, st.integers(2, 17))
def test_packed_windows_predict_every_token_once_from_the_one_before(documents: list[list[int]], window: int) -> None:
    windows = make_windows(all_documents(store_of(documents)), window, END, pack=True)
    stream = [t for d in documents for t in [END, *d]] + [END]
    assert learned(windows) == list(pairwise(stream))


@settings(deadline=None)
@given(DOCUMENTS, st.integers(2, 17))
def test_packed_windows_number_documents_and_count_positions_from_their_start(
    documents: list[list[int]], window: int
) -> None:
    documents = [*documents, [7]]  # at least two, else nothing needs telling apart
    batch = PackedWindows(all_documents(store_of(documents)), window, END).batch(np.arange(_count(documents, window)))
    assert batch.document_ids is not None
    assert batch.positions is not None
    for row in range(len(batch)):
        position = 0
        for place in range(window):
            begins = place > 0 and bool(batch.document_ids[row, place] != batch.document_ids[row, place - 1])
            filled = bool(batch.targets[row, place] != IGNORE)
            if filled and place > 0:
                assert begins == (batch.inputs[row, place].item() == END)
            position = 0 if begins or place == 0 else position + 1
            assert batch.positions[row, place].item() == position


def _count(documents: list[list[int]], window: int) -> int:
    return -(-sum(len(d) + 1 for d in documents) // window)


@settings(deadline=None)
@given(DOCUMENTS, st.integers(2, 17))
def test_padded_windows_hold_one_document_and_predict_its_every_token(documents: list[list[int]], window: int) -> None:
    windows = make_windows(all_documents(store_of(documents)), window, END, pack=False)
    pairs = [pair for d in documents for pair in zip([END, *d], [*d, END], strict=True)]
    assert learned(windows) == pairs
    assert windows.batch(np.arange(len(windows))).document_ids is None


@settings(deadline=None)
@given(DOCUMENTS, st.floats(0.01, 0.9))
def test_the_parts_share_nothing_and_lose_nothing(documents: list[list[int]], share: float) -> None:
    train, held = split_documents(store_of(documents), share)

    def places(part: TokenRanges) -> list[int]:
        return [i for a, b in zip(part.starts, part.stops, strict=True) for i in range(a, b)]

    total = sum(len(d) + 1 for d in documents)
    assert sorted(places(train) + places(held)) == list(range(total))
    assert len(places(held)) >= share * total - 1e-6


@settings(deadline=None)
@given(DOCUMENTS, st.floats(0.1, 0.9))
def test_equal_documents_fall_on_one_side(documents: list[list[int]], share: float) -> None:
    doubled = documents + documents
    store = store_of(doubled)
    train, held = split_documents(store, share)

    def contents(part: TokenRanges) -> set[tuple[int, ...]]:
        whole = set(zip(all_documents(store).starts.tolist(), all_documents(store).stops.tolist(), strict=True))
        ranges = zip(part.starts.tolist(), part.stops.tolist(), strict=True)
        return {tuple(store.tokens[a:b].tolist()) for a, b in ranges if (a, b) in whole}

    assert contents(train).isdisjoint(contents(held))


def test_of_a_single_text_the_last_tenth_is_held_out() -> None:
    train, held = split_documents(store_of([list(range(1, 1000))]), 0.1)
    assert (train.stops[-1], held.starts[0], held.stops[-1]) == (900, 900, 1000)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
def test_an_epoch_shows_every_example_once_and_nothing_leaks_into_the_next(count: int, size: int, seed: int) -> None:
    steps = steps_per_epoch(count, size)
    for epoch in range(3):
        batches = [batch_indices(seed, epoch * steps + place, count, size) for place in range(steps)]
        assert all(len(batch) == size for batch in batches[:-1])
        assert sorted(np.concatenate(batches).tolist()) == list(range(count))


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = {tuple(batch_indices(seed, step, 50, 50).tolist()) for seed in (1, 2) for step in (0, 1)}
    assert len(orders) == 4
    assert batch_indices(1, 1, 50, 50).tolist() == batch_indices(1, 1, 50, 50).tolist()


@settings(deadline=None)
@given(st.integers(1, 13), st.integers(1, 5), st.integers(1, 4))
def test_micro_batches_cover_each_row_once_whatever_the_cut(rows: int, size: int, world: int) -> None:
    batch = Batch(torch.arange(rows)[:, None].repeat(1, 3) + 1, torch.ones(rows, 3, dtype=torch.int64))
    shares = [list(batch.micro_batches(size, rank, world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    pieces = [piece for share in shares for piece in share]
    assert all(len(piece) == size for piece in pieces)
    real = [row[0].item() for piece in pieces for row in piece.inputs if row[0] > 0]
    assert sorted(real) == list(range(1, rows + 1))
    assert sum(piece.target_count() for piece in pieces) == batch.target_count()


@pytest.mark.parametrize(("workers", "depth"), [(0, 4), (1, 1), (2, 8)])
def test_prefetching_gives_the_same_batches(workers: int, depth: int) -> None:
    part = all_documents(store_of([[n + 1] * 20 for n in range(40)]))
    windows = PackedWindows(part, 8, END)
    prefetch = Prefetcher(lambda step: windows.batch(batch_indices(3, step, len(windows), 4)), workers, depth)
    for step in range(10, 40):
        expected = windows.batch(batch_indices(3, step, len(windows), 4))
        assert torch.equal(prefetch(step, 40).inputs, expected.inputs)
    prefetch.close()

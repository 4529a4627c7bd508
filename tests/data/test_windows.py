"""Splits, windows and batch order: every token is a target exactly once, and no document is in two splits."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.config import SansGPUError
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.pack import PackedWindows, PaddedWindows, make_windows
from sansgpu.data.prefetch import Prefetcher
from sansgpu.data.shards import DOCUMENT, TokenStore
from sansgpu.data.split import TokenRanges, all_documents, split_documents

END = 0
DOCUMENTS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=30), min_size=1, max_size=12)


def store_of(documents: list[list[int]]) -> TokenStore:
    """Returns a token store like build_store's: each document begins with END."""
    tokens = np.array([t for d in documents for t in [END, *d]], np.uint16)
    ends = np.cumsum([len(d) + 1 for d in documents])
    hashes = [abs(hash(tuple(d))) for d in documents]
    return TokenStore("test", tokens, np.array(list(zip(ends, hashes, strict=True)), dtype=DOCUMENT))


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    return [t for t in (batch.inputs, batch.targets, batch.positions, batch.document_ids) if t is not None]


def assert_same(ours: Batch, expected: Batch) -> None:
    assert len(tensors_of(ours)) == len(tensors_of(expected))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(ours), tensors_of(expected), strict=True))


def learned(windows: PackedWindows | PaddedWindows) -> list[tuple[int, int]]:
    """Returns the (input, target) pairs of all positions that have a target, in order."""
    batch = windows.batch(np.arange(len(windows)))
    kept = batch.targets != IGNORE
    return list(zip(batch.inputs[kept].tolist(), batch.targets[kept].tolist(), strict=True))


@given(DOCUMENTS, st.integers(2, 17))
def test_packed_windows_predict_every_token_once_from_the_one_before(documents: list[list[int]], window: int) -> None:
    windows = make_windows(all_documents(store_of(documents)), window, END, pack=True)
    stream = [t for d in documents for t in [END, *d]] + [END]
    assert learned(windows) == list(pairwise(stream))


@given(DOCUMENTS, st.integers(2, 17), st.integers(0, 99))
def test_recut_windows_have_the_same_tokens_in_another_order(
    documents: list[list[int]], window: int, seed: int
) -> None:
    part = all_documents(store_of(documents))
    windows = PackedWindows(part, window, END)
    recut = windows.recut(np.random.default_rng(seed))
    assert len(recut) == len(windows)
    pairs = learned(recut)
    assert sorted([pairs[0][0]] + [target for _, target in pairs[:-1]]) == sorted(part.tokens.tolist())
    # Only where the first document was cut does a token follow another one than in its document.
    joins = [*pairwise(part.tokens.tolist()), *((document[-1], END) for document in documents)]
    assert sum((Counter(pairs) - Counter(joins)).values()) <= 1


def test_recut_windows_begin_at_other_places_of_a_single_document() -> None:
    windows = PackedWindows(all_documents(store_of([list(range(1, 50))])), 8, END)
    firsts = {windows.recut(np.random.default_rng(seed)).batch(np.array([0])).inputs[0, 0].item() for seed in range(40)}
    assert firsts == set(range(8))


def reference_windows(part: TokenRanges, window: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yields a list of (input, target, document id, position) per window, computed in a plain loop."""
    ranges = list(zip(part.starts.tolist(), part.stops.tolist(), strict=True))
    stream = [(int(part.tokens[i]), number) for number, (a, b) in enumerate(ranges) for i in range(a, b)]
    for start in range(0, len(stream), window):
        places, position, documents = [], 0, 0
        for place in range(start, start + window):
            document = stream[place][1] if place < len(stream) else -1
            if place > start:
                before = stream[place - 1][1] if place <= len(stream) else -1
                position, documents = (position + 1, documents) if before == document else (0, documents + 1)
            token = stream[place][0] if document >= 0 else END
            following = stream[place + 1][0] if place + 1 < len(stream) else END
            places.append((token, following if document >= 0 else IGNORE, documents, position))
        yield places


@given(DOCUMENTS, st.integers(2, 17))
def test_packed_windows_number_documents_and_count_positions_from_their_start(
    documents: list[list[int]], window: int
) -> None:
    part = all_documents(store_of([*documents, [7]]))  # at least two documents, else there are no document ids
    windows = PackedWindows(part, window, END)
    batch = windows.batch(np.arange(len(windows)))
    assert batch.document_ids is not None
    assert batch.positions is not None
    ours = torch.stack([batch.inputs, batch.targets, batch.document_ids, batch.positions], dim=-1)
    assert ours.tolist() == [[list(place) for place in row] for row in reference_windows(part, window)]


@given(DOCUMENTS, st.integers(2, 17), st.booleans(), st.integers(0, 99))
def test_a_window_depends_on_its_number_alone(documents: list[list[int]], window: int, pack: bool, seed: int) -> None:
    windows = make_windows(all_documents(store_of(documents)), window, END, pack)
    order = np.random.default_rng(seed).permutation(len(windows))
    together = windows.batch(order)
    for row, number in enumerate(order):
        assert_same(windows.batch(np.array([number])), together.rows(row, row + 1))


@given(DOCUMENTS, st.floats(0.05, 0.9), st.integers(2, 17), st.booleans())
def test_the_document_before_a_cut_one_ends_like_any_other(
    documents: list[list[int]], share: float, window: int, pack: bool
) -> None:
    _, held = split_documents(store_of(documents), share)
    ranges = zip(held.starts.tolist(), held.stops.tolist(), strict=True)
    texts = [held.tokens[a:b].tolist() for a, b in ranges]
    expected = [pair for text in texts for pair in pairwise([*text, END])]
    assert learned(make_windows(held, window, END, pack)) == expected


@given(DOCUMENTS, st.integers(2, 17))
def test_padded_windows_hold_one_document_and_predict_its_every_token(documents: list[list[int]], window: int) -> None:
    windows = make_windows(all_documents(store_of(documents)), window, END, pack=False)
    pairs = [pair for d in documents for pair in zip([END, *d], [*d, END], strict=True)]
    assert learned(windows) == pairs
    assert windows.batch(np.arange(len(windows))).document_ids is None


@given(DOCUMENTS, st.integers(2, 17))
def test_padding_follows_the_document_and_is_never_learned(documents: list[list[int]], window: int) -> None:
    windows = PaddedWindows(all_documents(store_of(documents)), window, END)
    batch = windows.batch(np.arange(len(windows)))
    rows = [[END, *d][start : start + window] for d in documents for start in range(0, len(d) + 1, window)]
    assert batch.inputs.tolist() == [row + [END] * (window - len(row)) for row in rows]
    assert (batch.targets != IGNORE).tolist() == [[place < len(row) for place in range(window)] for row in rows]


@given(DOCUMENTS, st.floats(0.01, 0.9))
def test_the_parts_share_nothing_and_lose_nothing(documents: list[list[int]], share: float) -> None:
    train, held = split_documents(store_of(documents), share)

    def places(part: TokenRanges) -> list[int]:
        return [i for a, b in zip(part.starts, part.stops, strict=True) for i in range(a, b)]

    total = sum(len(d) + 1 for d in documents)
    assert sorted(places(train) + places(held)) == list(range(total))
    assert len(places(held)) >= share * total - 1e-6
    equal = Counter(map(tuple, documents))  # equal documents stay together, so they may exceed the share
    surplus = max(((len(d) + 1) * count for d, count in equal.items() if count > 1), default=0)
    assert len(places(held)) <= share * total + 1 + surplus


@given(st.permutations(range(12)), st.floats(0.1, 0.9))
def test_which_documents_are_held_out_depends_on_no_order(order: list[int], share: float) -> None:
    documents = [[n + 1] * (3 + n) for n in range(12)]

    def held_tokens(arranged: list[list[int]]) -> list[list[int]]:
        held = split_documents(store_of(arranged), share)[1]
        ranges = zip(held.starts.tolist(), held.stops.tolist(), strict=True)
        return sorted(held.tokens[a:b].tolist() for a, b in ranges)

    assert held_tokens([documents[n] for n in order]) == held_tokens(documents)


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


@pytest.mark.parametrize(("size", "cut"), [(1000, 900), (1001, 900), (1009, 908), (10, 9)])
def test_the_last_tenth_of_a_single_text_is_held_out(size: int, cut: int) -> None:
    train, held = split_documents(store_of([[1] * (size - 1)]), 0.1)
    assert (train.starts.tolist(), train.stops.tolist()) == ([0], [cut])
    assert (held.starts.tolist(), held.stops.tolist()) == ([cut], [size])


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


@given(DOCUMENTS, st.integers(2, 9), st.integers(1, 4))
def test_micro_batches_keep_positions_and_documents_beside_their_tokens(
    documents: list[list[int]], window: int, size: int
) -> None:
    windows = PackedWindows(all_documents(store_of([*documents, [7]])), window, END)
    whole = windows.batch(np.arange(len(windows)))
    pieces = list(whole.micro_batches(size))
    fields = zip(*(tensors_of(piece) for piece in pieces), strict=True)
    joined = Batch(*(torch.cat(field) for field in fields))
    assert_same(joined.rows(0, len(whole)), whole)
    assert joined.rows(len(whole), len(joined)).target_count() == 0


@given(DOCUMENTS, st.integers(2, 9), st.integers(1, 9), st.booleans())
def test_pieces_end_where_a_document_or_their_length_does(
    documents: list[list[int]], window: int, length: int, pack: bool
) -> None:
    store = all_documents(store_of([*documents, [7]]))
    whole = make_windows(store, window, END, pack).batch(np.arange(1))
    cut = whole.in_pieces(length)
    assert_same(Batch(cut.inputs, cut.targets, cut.positions, whole.document_ids), whole)
    ids = torch.zeros_like(whole.inputs) if whole.document_ids is None else whole.document_ids
    assert cut.document_ids is not None
    for before, after in pairwise(range(window)):
        together = ids[0, before] == ids[0, after] and before // length == after // length
        assert bool(cut.document_ids[0, before] == cut.document_ids[0, after]) == bool(together)


@pytest.mark.parametrize(("workers", "depth"), [(0, 4), (1, 1), (2, 8)])
def test_prefetching_gives_the_same_batches(workers: int, depth: int) -> None:
    part = all_documents(store_of([[n + 1] * 20 for n in range(40)]))
    windows = PackedWindows(part, 8, END)
    prefetch = Prefetcher(
        lambda step: windows.batch(batch_indices(3, step, len(windows), 4)), workers, depth, timeout=60
    )
    for step in range(10, 40):
        expected = windows.batch(batch_indices(3, step, len(windows), 4))
        assert_same(prefetch(step, 40), expected)
    prefetch.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_no_batch_is_prepared_beyond_the_last_or_twice(workers: int) -> None:
    made: list[int] = []

    def make(step: int) -> Batch:
        made.append(step)
        return Batch(torch.tensor([[step]]), torch.tensor([[step]]))

    prefetch = Prefetcher(make, workers, 4, timeout=60)
    assert [prefetch(step, 9).inputs.item() for step in range(3, 9)] == list(range(3, 9))
    prefetch.close()
    assert sorted(made) == list(range(3, 9))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_while_a_batch_is_prepared_reaches_the_step_that_needs_it(workers: int) -> None:
    def make(step: int) -> Batch:
        if step == 2:
            raise OSError("the disk is gone")
        return Batch(torch.tensor([[step]]), torch.tensor([[step]]))

    prefetch = Prefetcher(make, workers, 2, timeout=60)
    assert [prefetch(step, 9).inputs.item() for step in range(2)] == [0, 1]
    with pytest.raises(SansGPUError if workers else OSError, match="disk is gone"):
        prefetch(2, 9)
    prefetch.close()

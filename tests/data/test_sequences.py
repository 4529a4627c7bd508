"""Packed sequences of different lengths are split into micro-batches and counted correctly."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.data.batch import IGNORE
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.split import split_examples


def made(lengths: list[int], by_token: bool, seed: int) -> tuple[PackedSequences, list[np.ndarray], list[np.ndarray]]:
    draws = np.random.default_rng(seed)
    tokens = [draws.integers(0, 99, length) for length in lengths]
    if by_token:
        targets = [np.where(draws.random(length) < 0.5, draws.integers(0, 99, length), IGNORE) for length in lengths]
        return PackedSequences.of(tokens, targets, tokens, np.arange(len(lengths))), tokens, targets
    places = draws.integers(0, 5, (len(lengths), 2))
    return PackedSequences.of(tokens, places, None, np.arange(len(lengths))), tokens, list(places)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_micro_batches_of_all_ranks_are_the_batch(
    lengths: list[int], by_token: bool, size: int, ranks: int, seed: int
) -> None:
    batch, tokens, targets = made(lengths, by_token, seed)
    shares = [list(batch.micro_batches(size, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    cut = [piece for step in zip(*shares, strict=True) for piece in step]
    pieces, others = cut[: -(-len(lengths) // size)], cut[-(-len(lengths) // size) :]
    assert all(len(piece) == 1 and piece.target_count() == 0 for piece in others), "padding batches must have no target"
    assert torch.equal(torch.cat([p.tokens for p in pieces]), torch.from_numpy(np.concatenate(tokens)))
    assert sum(p.token_count() for p in pieces) == batch.token_count() == sum(lengths)
    assert sum(p.target_count() for p in pieces) == batch.target_count()
    joined = np.concatenate(targets) if by_token else np.stack(targets)
    assert torch.equal(torch.cat([p.targets for p in pieces]), torch.from_numpy(joined))
    assert all(int(p.lengths.sum()) == len(p.tokens) for p in pieces)
    assert [int(n) for p in pieces for n in (p.numbers if p.numbers is not None else [])] == list(range(len(lengths)))


@settings(max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=2), min_size=2, max_size=40), st.floats(0.01, 0.9))
def test_equal_examples_are_held_out_together(contents: list[bytes], share: float) -> None:
    sizes = np.array([len(content) for content in contents])
    train, held = split_examples(contents, sizes, share)
    assert sorted([*train, *held]) == list(range(len(contents)))
    assert len(held) >= 1
    assert not {contents[n] for n in train} & {contents[n] for n in held}
    assert sizes[held].sum() >= share * sizes.sum() or not len(train)

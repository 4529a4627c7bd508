"""Initial weights from counts of bigrams, compared with a plain reference in float64."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import ModelConfig
from sansgpu.data.split import TokenRanges
from sansgpu.models import TransformerLM
from sansgpu.models.bigrams import DISCOUNT, initialize_from_bigrams
from sansgpu.tasks.pretrain.bigrams import count_bigrams
from tests.kernels.threads import assert_equal_on_all_threads

Pairs = dict[tuple[int, int], int]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, Pairs]:
    """Draws a vocabulary size and counts of pairs."""
    size = draw(st.integers(4, 40))
    token = st.integers(0, size - 1)
    counts = draw(st.dictionaries(st.tuples(token, token), st.integers(1, 50), min_size=1, max_size=200))
    return size, dict(sorted(counts.items()))


def kneser_ney(size: int, counts: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Returns log q(j), and S(i, j) of the module's docstring, both without any approximation."""
    ends = np.full(size, 0.1)
    for _, second in counts:
        ends[second] += 1
    share = ends / ends.sum()
    ratios = np.zeros((size, size))
    for (first, second), count in counts.items():
        followers = sum(1 for key in counts if key[0] == first)
        ratios[first, second] = np.log(1 + (count - DISCOUNT) / (DISCOUNT * followers * share[second]))
    return np.log(share), ratios


def initialized(size: int, counts: Pairs, **shape: object) -> TransformerLM:
    """Returns a model whose initial weights come from these counts."""
    model = TransformerLM(ModelConfig.model_validate({"n_layers": 2, "n_heads": 1, "vocab_size": size, **shape})).eval()
    keys = np.array(list(counts))
    initialize_from_bigrams(model, keys[:, 0], keys[:, 1], np.array(list(counts.values())), 0)
    return model


@torch.no_grad()
def predictions(model: TransformerLM, size: int) -> np.ndarray:
    """Returns the logits after each token alone, (V, V) float64, without random weights that the layout starts with."""
    if model.position is not None:
        model.position.weight.zero_()
    for name, weight in model.named_parameters():
        outputs = ("attention.o.weight", "feed_forward.down.weight") if model.head else ("attention.o.weight",)
        if name.endswith(outputs) or name == "blocks.0.feed_forward.down.weight":
            weight.zero_()
    return model.logits(model.hidden(torch.arange(size)[:, None]))[:, 0].double().numpy()


KINDS = {
    "untied": {"tie_embeddings": False},
    "swiglu": {"activation": "swiglu"},
    "relu2": {"activation": "relu2"},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu"},
    "untied gelu": {"activation": "gelu", "tie_embeddings": False},
    "llama": {"architecture": "llama"},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(drawn=pairs())
def test_predictions_are_those_of_a_bigram_model(kind: str, drawn: tuple[int, Pairs]) -> None:
    """The width allows an exact factorization. Only a few of the largest vectors are shortened."""
    size, counts = drawn
    width = 2 * size + 8
    logits = predictions(initialized(size, counts, d_model=width, d_ff=2 * width, **KINDS[kind]), size)
    log_shares, ratios = kneser_ney(size, counts)
    logits -= log_shares
    logits -= logits[:, :1]  # each row is defined up to a constant
    exact = 0
    for row, wanted in zip(logits, ratios - ratios[:, :1], strict=True):
        exact += np.abs(row - wanted).max() < 0.05 * (1 + np.abs(wanted).max())
    occurring = len({first for first, _ in counts})
    assert exact >= size - 2 - 0.15 * occurring


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_model_gets_the_best_approximation(tied: bool) -> None:
    """The weighted error is at most 5% above that of the exact singular vectors, except for the largest rows."""
    draw, size, width = np.random.default_rng(0), 200, 48
    first, second = draw.zipf(1.5, 40_000) % size, draw.zipf(1.5, 40_000) % size
    counts = dict(sorted(Counter(zip(first.tolist(), ((first + second) % size).tolist(), strict=True)).items()))
    model = initialized(size, counts, d_model=width, d_ff=2 * width, tie_embeddings=tied)
    log_shares, ratios = kneser_ney(size, counts)
    totals, ends = np.full(size, 0.1), np.full(size, 0.1)
    for (i, j), count in counts.items():
        totals[i] += count
        ends[j] += count
    rows, columns = np.sqrt(totals / totals.sum())[:, None], np.sqrt(ends / ends.sum())
    values = np.linalg.svd(rows * ratios * columns, compute_uv=False)
    rank = (width - 6) // 2 if tied else width - 3
    best = np.square(values[rank:]).sum()
    logits = predictions(model, size) - log_shares
    shift = ((ratios - logits) * columns**2).sum(1, keepdims=True) / np.square(columns).sum()
    errors = np.sort(np.square(rows * (ratios - logits - shift) * columns).sum(1))
    assert errors[: int(0.9 * size)].sum() <= 1.05 * best


def test_the_initial_model_is_the_same_for_any_number_of_threads() -> None:
    draw = np.random.default_rng(1)
    counts = {(int(i), int(j)): int(n) for i, j, n in draw.integers(1, 300, (3000, 3))}
    pairs = dict(sorted(counts.items()))
    assert_equal_on_all_threads(lambda: list(initialized(300, pairs, d_model=64, d_ff=128).parameters()))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=30), min_size=1, max_size=8), st.integers(2, 9))
def test_pairs_are_counted_in_chunks(documents: list[list[int]], chunk: int) -> None:
    tokens = np.array([token for document in documents for token in document], np.uint16)
    stops = np.cumsum([len(document) for document in documents])
    part = TokenRanges(tokens, stops - [len(document) for document in documents], stops)
    first, second, counts = count_bigrams(part, 7, chunk=chunk)
    found = dict(zip(zip(first.tolist(), second.tolist(), strict=True), counts.tolist(), strict=True))
    assert found == Counter(pairwise(tokens.tolist()))
    assert list(found) == sorted(found)


def test_a_long_text_is_sampled() -> None:
    tokens = np.arange(1000, dtype=np.uint16) % 10
    starts = np.arange(0, 1000, 10)
    _, _, counts = count_bigrams(TokenRanges(tokens, starts, starts + 10), 10, limit=300)
    assert 200 <= counts.sum() <= 300
    _, _, counts = count_bigrams(TokenRanges(tokens, np.array([0]), np.array([1000])), 10, limit=300)
    assert counts.sum() == 299

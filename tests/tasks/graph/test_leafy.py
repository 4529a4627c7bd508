"""Texts are cut into windows with their triples, and masked."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.data.batch import IGNORE
from sansgpu.data.forms.graphs import GraphDocument, Triple
from sansgpu.data.tokenizer import BPETokenizer
from sansgpu.tasks.graph.batch import GraphBatch, MaskRules, mask_example
from sansgpu.tasks.graph.leafy import (
    KNOWN,
    LONG_TAIL,
    NO_HEAD,
    NO_RELATION,
    TAKEN,
    LeafyDataset,
    LeafyExample,
    LeafyRules,
    PlacedTriple,
    build_leafy,
    relations_of,
)
from sansgpu.tasks.graph.tokenizer import BERT, MaskTokenizer

TEXT = "metformin treats type 2 diabetes and lowers glucose"
ISA = Triple("type 2 diabetes", "isa", "chronic disease")
TREATS = Triple("metformin", "treats", "diabetes")


@pytest.fixture(scope="module")
def tokenizer() -> MaskTokenizer:
    """A tokenizer with one token per word of the texts."""
    corpus = [TEXT, f" {TEXT} chronic disease"] * 20
    return MaskTokenizer(BPETokenizer.train(corpus, 600, BERT).backend, "test")


def build(
    tokenizer: MaskTokenizer, documents: Sequence[GraphDocument], rules: LeafyRules | None = None, **more: object
) -> LeafyDataset:
    return build_leafy(documents, tokenizer, relations_of(documents), rules or LeafyRules(16, 3), **more)  # type: ignore[arg-type]


def document(*triples: Triple, text: str = TEXT, name: str = "d") -> GraphDocument:
    return GraphDocument(name, name, text, triples)


def test_a_triple_is_attached_to_the_first_token_of_its_head(tokenizer: MaskTokenizer) -> None:
    graphs = build(tokenizer, [document(ISA)])
    example = graphs.example(0)
    decoded = [tokenizer.backend.id_to_token(int(token)) for token in example.tokens]
    assert decoded[:5] == ["[CLS]", "metformin", "Ġtreats", "Ġtype", "Ġ"]
    assert decoded[-1] == "[SEP]"
    (placed,) = example.placed
    assert placed.root == 3
    assert tokenizer.decode(example.tokens[3 : 3 + placed.head_length].tolist()) == " type 2 diabetes"
    assert tokenizer.decode(placed.tail.tolist()) == " chronic disease"
    assert placed.relation == 1
    assert example.nodes == len(example.tokens) + 2


def test_the_batch_names_each_nodes_root_and_slot(tokenizer: MaskTokenizer) -> None:
    graphs = build(tokenizer, [document(ISA, TREATS)])
    example = graphs.example(0)
    rules = MaskRules(0.0, 3, 1.0, 0, tokenizer.mask_id, tokenizer.ordinary_ids())
    batch = GraphBatch.of([example, example], [mask_example(example, rules, 0, 0, 0)] * 2)
    roots, nodes = len(example.tokens), example.nodes
    assert batch.nodes[:roots].tolist() == [[i, 0] for i in range(roots)]
    assert batch.nodes[roots:nodes].tolist() == [[1, 1], [3, 1], [3, 2]]
    assert batch.counts() == (0, 6)
    second = batch.placed_triples()[2:]
    assert second.tolist() == [[2, nodes + 1, 1, nodes + roots, 1, 0, 0], [1, nodes + 3, 4, nodes + roots + 1, 2, 0, 0]]
    assert batch.rows(1, 2).placed_triples().tolist() == batch.rows(0, 1).placed_triples().tolist()


def test_triples_that_cannot_be_attached_are_counted_by_reason(tokenizer: MaskTokenizer) -> None:
    known = Triple("glucose", "isa", "type")
    triples = [
        ISA,
        Triple("aspirin", "isa", "type"),
        Triple("metformin", "isa", "a disease of a disease"),
        Triple("metformin", "cures", "type"),
        known,
    ]
    graphs = build_leafy([document(*triples)], tokenizer, ["isa"], LeafyRules(16, 3), known=frozenset([known.fact]))
    assert graphs.dropped == Counter({NO_HEAD: 1, LONG_TAIL: 1, NO_RELATION: 1, KNOWN: 1})
    assert [t.tail for t in graphs.triples] == ["chronic disease"]
    note = graphs.note()
    assert note is not None
    assert note.startswith("1 of 5 triples attached to 1 window; skipped: 1 because the head is not in the text, ")
    assert build(tokenizer, [document(ISA)]).note() is None


def test_an_inverse_triple_is_the_same_fact() -> None:
    assert Triple("a", "inverse of isa", "b", None, "1", "2").fact == Triple("b", "isa", "a", None, "2", "1").fact


def test_triples_of_one_head_take_turns(tokenizer: MaskTokenizer) -> None:
    second = Triple("metformin", "treats", "type")
    turns = build(tokenizer, [document(TREATS, second, ISA)])
    assert [[p.triple.tail for p in placed] for _, placed in turns.examples] == [
        ["diabetes", "chronic disease"],
        ["type"],
    ]
    first = build(tokenizer, [document(TREATS, second, ISA)], LeafyRules(16, 3, triples="first"))
    assert len(first) == 1
    assert first.dropped == {TAKEN: 1}


def test_a_head_is_found_at_whole_tokens_only(tokenizer: MaskTokenizer) -> None:
    graphs = build(tokenizer, [document(Triple("formin", "isa", "type"), text="metformin formin")])
    assert graphs.example(0).placed[0].root > 1


def test_a_head_with_a_span_is_placed_at_that_span(tokenizer: MaskTokenizer) -> None:
    text = "glucose and glucose"
    graphs = build(tokenizer, [document(Triple("glucose", "isa", "type", (12, 19)), text=text)])
    (placed,) = graphs.example(0).placed
    assert (
        tokenizer.decode(graphs.example(0).tokens[placed.root : placed.root + placed.head_length].tolist())
        == " glucose"
    )
    assert placed.root > 2


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(4, 20), st.integers(0, 6))
def test_windows_hold_every_token(tokenizer: MaskTokenizer, words: int, roots: int, stride: int) -> None:
    text = " ".join(["glucose", "type", "treats"][i % 3] for i in range(words))
    graphs = build(tokenizer, [document(text=text)], LeafyRules(roots, 3, stride))
    ids = tokenizer.encode_batch([text])[0].ids
    step = roots - 2 - min(stride, roots - 3)
    seen: dict[int, int] = {}
    for number, (tokens, _) in enumerate(graphs.windows):
        assert len(tokens) <= roots
        assert (tokens[0], tokens[-1]) == (tokenizer.begin_id, tokenizer.end_id)
        seen |= dict(enumerate(tokens[1:-1].tolist(), number * step))
    assert [seen[place] for place in range(len(ids))] == ids


def random_example(draws: np.random.Generator, roots: int, triples: int) -> LeafyExample:
    starts = draws.random(roots) < 0.6
    starts[0] = starts[-1] = False
    starts[1] = True
    places = np.sort(draws.choice(np.arange(1, roots - 1), triples, replace=False))
    placed = [PlacedTriple(int(p), 1, 1, draws.integers(10, 99, draws.integers(1, 4)), TREATS) for p in places]
    return LeafyExample(draws.integers(10, 99, roots), starts, placed)


@settings(max_examples=60)
@given(st.integers(0, 999), st.integers(4, 80), st.integers(1, 6), st.sampled_from([0.0, 0.15, 0.5]), st.booleans())
def test_masks_cover_words_and_whole_tails(seed: int, roots: int, longest: int, ratio: float, at_least: bool) -> None:
    draws = np.random.default_rng(seed)
    example = random_example(draws, roots, int(draws.integers(0, min(4, roots - 2) + 1)))
    rules = MaskRules(ratio, longest, 0.3, int(at_least), 5, np.arange(10, 99))
    shown = mask_example(example, rules, seed, 1, 2)
    again = mask_example(example, rules, seed, 1, 2)
    assert np.array_equal(shown.tokens, again.tokens)
    original = np.concatenate([example.tokens, *(p.tail for p in example.placed)])
    chosen = shown.targets != IGNORE
    assert np.array_equal(shown.targets[chosen], original[chosen])
    assert np.array_equal(shown.tokens[~chosen], original[~chosen])
    assert not chosen[0]
    assert not chosen[roots - 1]
    budget = int(ratio * (roots - 2))
    assert int(chosen[:roots].sum()) < budget + longest
    if longest == 1:
        assert int(chosen[:roots].sum()) == budget
    else:  # spans begin and end at word boundaries
        for place in np.flatnonzero(chosen[:roots]):
            before, behind = shown.bounds[place]
            assert example.word_starts[before + 1]
            assert behind == roots - 1 or example.word_starts[behind]
            assert chosen[before + 1 : behind].all()
            assert behind - before - 1 <= longest
    start, groups = roots, []
    for placed in example.placed:
        group = chosen[start : start + len(placed.tail)]
        assert group.all() or not group.any()
        groups.append(bool(group.all()))
        start += len(placed.tail)
    if at_least and groups:
        assert any(groups)


def test_four_of_five_masked_tokens_become_the_mask() -> None:
    draws = np.random.default_rng(0)
    example = LeafyExample(draws.integers(10, 99, 4002), np.ones(4002, bool), [])
    rules = MaskRules(0.5, 1, 0.0, 0, 5, np.arange(10, 99))
    shown = mask_example(example, rules, 0, 0, 0)
    chosen = shown.targets != IGNORE
    fates = shown.tokens[chosen]
    assert abs((fates == 5).mean() - 0.8) < 0.03
    assert abs((fates == shown.targets[chosen]).mean() - 0.1) < 0.03
    assert fates[fates != 5].min() >= 10
    other = mask_example(example, rules, 0, 1, 0)
    assert not np.array_equal(other.targets, shown.targets)  # masks differ between epochs

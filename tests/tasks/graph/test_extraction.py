"""Triple extraction: beam search, the queries for a text, and evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sansgpu.config import ConfigError
from sansgpu.data.forms.graphs import GraphDocument, Triple
from sansgpu.jobs.extract import ExtractRequest, Triples, extract
from sansgpu.tasks.graph import tail_prediction as gaps
from sansgpu.tasks.graph.extraction import Agreement, DocumentTriples, ExtractedTriple, ExtractionRules, TripleExtractor
from sansgpu.tasks.graph.leafy import LeafyRules
from sansgpu.tasks.graph.tail_prediction import BeamSearch, TailPredictor, TailQuery
from sansgpu.tasks.graph.tokenizer import GraphCodec
from sansgpu.train.loading import ModelRequest
from tests.processes import write_rows
from tests.tasks.graph.test_link_prediction import CPU, LEAVES, quiet, run_of, untrained, words_tokenizer

pytestmark = pytest.mark.usefixtures("home")

WORDS = ["red", "blue", "green", "old", "new", "fox", "owl", "bear"]
TOKENIZER = words_tokenizer(*WORDS, "saw the , .")
RULES = LeafyRules(roots=10, leaves=LEAVES)
RELATIONS = ("eats", "sees", "inverse of eats")
EVERY = float("-inf")


@pytest.fixture(scope="module")
def predictor() -> TailPredictor:
    return TailPredictor(untrained(TOKENIZER, len(RELATIONS)), TOKENIZER.mask_id, CPU)


def ids(text: str) -> list[int]:
    return [i for name in text.split() for i in TOKENIZER.encode_names([name])[0]]


def question(text: str, place: int, relation: int, length: int = 1) -> TailQuery:
    return TailQuery(np.array([TOKENIZER.begin_id, *ids(text), TOKENIZER.end_id]), place, length, relation)


QUESTIONS = [
    question("the old fox saw the owl", 2, 1, 2), question("the red bear", 3, 2), question("new", 1, 3),
    question("the bear saw the green fox .", 6, 1),
]  # fmt: skip


def step(predictor: TailPredictor, asked: TailQuery, before: Sequence[int], length: int) -> np.ndarray:
    """Returns the log-probabilities of the token of the next leaf, given the previous tokens."""
    leaves = np.array([[*before, *[TOKENIZER.mask_id] * (length - len(before))]])
    return predictor.log_probabilities([asked], leaves)[0, len(before)].double().numpy()


def searched(predictor: TailPredictor, asked: TailQuery, width: int, count: int) -> list[tuple[str, float]]:
    """Returns the best tails and their scores by a beam search in plain loops, without early pruning."""
    found: dict[str, float] = {}
    for length in range(1, LEAVES + 1):
        beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(length):
            longer = []
            for total, before in beams:
                said = step(predictor, asked, before, length)
                fresh = [int(i) for i in TOKENIZER.ordinary_ids() if int(i) not in before[-1:]]
                longer += [(total + said[i], (*before, i)) for i in fresh]
            beams = sorted(longer, reverse=True)[:width]
        for total, tokens in beams:
            found[TOKENIZER.decode(tokens)] = total / length
    return sorted(found.items(), key=lambda item: -item[1])[:count]


@pytest.mark.parametrize(("width", "count"), [(3, 1), (3, 4), (10, 2)])
def test_a_search_finds_what_plain_loops_find(predictor: TailPredictor, width: int, count: int) -> None:
    search = BeamSearch(predictor, TOKENIZER, LEAVES, width, count)
    found = search.predict_tails(QUESTIONS, np.full(len(QUESTIONS), EVERY))
    for asked, tails in zip(QUESTIONS, found, strict=True):
        expected = searched(predictor, asked, width, count)
        assert [tail.text for tail in tails] == [text for text, _ in expected]
        assert [tail.score for tail in tails] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_a_wide_search_finds_the_best_of_all_tails(predictor: TailPredictor) -> None:
    ordinary = TOKENIZER.ordinary_ids().tolist()
    search = BeamSearch(predictor, TOKENIZER, 2, predictor.vocabulary, 1)
    for asked in QUESTIONS:
        first, empty = step(predictor, asked, (), 1), step(predictor, asked, (), 2)
        scores = {TOKENIZER.decode([i]): first[i] for i in ordinary}
        then = {i: step(predictor, asked, (i,), 2) for i in ordinary}
        scores |= {
            TOKENIZER.decode([i, j]): (empty[i] + then[i][j]) / 2 for i, j in itertools.product(ordinary, repeat=2)
        }
        [[tail]] = search.predict_tails([asked], np.array([EVERY]))
        assert tail.text == max(scores, key=lambda text: scores[text])
        assert tail.score == pytest.approx(scores[tail.text], abs=1e-4)


def test_questions_asked_together_find_what_each_finds_alone(
    predictor: TailPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = BeamSearch(predictor, TOKENIZER, LEAVES, 5, 3)
    together = search.predict_tails(QUESTIONS, np.full(len(QUESTIONS), EVERY))
    alone = [search.predict_tails([asked], np.array([EVERY]))[0] for asked in QUESTIONS]
    monkeypatch.setattr(gaps, "MAX_NODES", 25)
    in_pieces = search.predict_tails(QUESTIONS, np.full(len(QUESTIONS), EVERY))
    for others in (alone, in_pieces):
        assert [[t.text for t in tails] for tails in others] == [[t.text for t in tails] for tails in together]
        scores = [[t.score for tails in answers for t in tails] for answers in (others, together)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_a_floor_leaves_out_what_is_below_it_and_nothing_else(predictor: TailPredictor) -> None:
    search = BeamSearch(predictor, TOKENIZER, LEAVES, 5, 3)
    every = search.predict_tails(QUESTIONS, np.full(len(QUESTIONS), EVERY))
    floors = np.array([tails[number % 3].score for number, tails in enumerate(every)])
    for floor, some, tails in zip(floors, search.predict_tails(QUESTIONS, floors - 1e-6), every, strict=True):
        assert [tail.text for tail in some] == [tail.text for tail in tails if tail.score >= floor]


def read(predictor: TailPredictor, *documents: GraphDocument, **rules: Any) -> list[DocumentTriples]:
    chosen = ExtractionRules(**{"windows": RULES, "relations": RELATIONS, "beams": 4, **rules})
    return list(TripleExtractor(predictor, GraphCodec(TOKENIZER, chosen.relations), chosen).read(documents, quiet))


def text_of(text: str, *triples: Triple, entities: Sequence[str] = ()) -> GraphDocument:
    return GraphDocument("d", "d", text, triples, tuple(entities))


def heads_of(found: DocumentTriples) -> list[str]:
    return list(dict.fromkeys(triple.head for triple in found.triples))


def test_heads_are_those_given_else_entities_else_those_of_triples_else_words(predictor: TailPredictor) -> None:
    text = "the old fox saw the bear ."
    triples = Triple("fox", "eats", "owl"), Triple("bear", "eats", "owl"), Triple("fox", "sees", "owl")
    known = text_of(text, *triples, entities=["old fox", "owl"])
    assert [heads_of(found) for found in read(predictor, known, heads=("the", "owl", "saw the"))] == [
        ["the", "saw the"]
    ]
    assert [heads_of(found) for found in read(predictor, known)] == [["old fox"]]
    assert [heads_of(found) for found in read(predictor, text_of(text, *triples))] == [["fox", "bear"]]
    assert [heads_of(found) for found in read(predictor, text_of(text))] == [["the", "old", "fox", "saw", "bear"]]
    assert read(predictor, text_of(""))[0].triples == []


def test_every_head_is_asked_for_every_relation_but_inverse_ones(predictor: TailPredictor) -> None:
    [found] = read(predictor, text_of("the fox"), heads=("fox",))
    assert [triple.relation for triple in found.triples] == ["eats", "sees"]
    [found] = read(predictor, text_of("the fox"), heads=("fox",), only=("inverse of eats",), per_query=3)
    assert [triple.relation for triple in found.triples] == ["inverse of eats"] * 3
    search = BeamSearch(predictor, TOKENIZER, LEAVES, 4, 3)
    [tails] = search.predict_tails([question("the fox", 2, 3)], np.array([EVERY]))
    assert [triple.tail for triple in found.triples] == [tail.text for tail in tails]
    assert [triple.score for triple in found.triples] == pytest.approx([tail.score for tail in tails], abs=1e-4)


def test_a_least_score_leaves_out_the_rest(predictor: TailPredictor) -> None:
    document = text_of("the old fox saw the bear .", Triple("fox", "eats", "owl"))
    heads = "fox", "bear", "old", "saw"
    [every] = read(predictor, document, heads=heads)
    scores = sorted(triple.score for triple in every.triples)
    [some] = read(predictor, document, heads=heads, min_score=scores[4])
    assert some.triples == [triple for triple in every.triples if triple.score >= scores[4]]
    assert 0 < len(some.triples) < len(every.triples)
    [none] = read(predictor, document, heads=heads, min_score=0)
    assert none.triples == []
    assert none.given == every.given  # the best tail for the document's own triples, regardless of its score


def test_each_window_of_a_long_text_is_read_and_what_is_found_twice_is_given_once(predictor: TailPredictor) -> None:
    windows = ["the fox saw the old owl , red", "the fox saw the new owl , red"]  # eight words fill a window
    [whole] = read(predictor, text_of(" ".join(windows)), heads=("fox",), per_query=4)
    apart = [read(predictor, text_of(window), heads=("fox",), per_query=4)[0].triples for window in windows]
    best: dict[tuple[str, str, str], float] = {}
    for *key, score in itertools.chain(*apart):
        triple = key[0], key[1], key[2]
        best[triple] = max(score, best.get(triple, EVERY))
    assert len(best) < sum(map(len, apart)), "no triple was found in both windows"
    assert {(t.head, t.relation, t.tail): pytest.approx(t.score, abs=2e-4) for t in whole.triples} == best


def test_closed_tails_are_ranked_names_without_the_head(predictor: TailPredictor) -> None:
    names = ["fox", "Fox", "old fox", "bear", "red", "the red old bear"]
    document = text_of("the old fox saw the bear .", entities=names)
    [found] = read(predictor, document, heads=("fox",), only=("eats",), closed=True, per_query=9)
    asked = question("the old fox saw the bear .", 3, 1)
    expected = {}
    for name in ("old fox", "bear", "red"):
        tokens = ids(name)
        said = predictor.log_probabilities([asked], np.full((1, len(tokens)), TOKENIZER.mask_id))[0]
        expected[name] = float(sum(said[slot, token] for slot, token in enumerate(tokens)) / len(tokens))
    assert {t.tail: pytest.approx(t.score, abs=1e-4) for t in found.triples} == expected
    assert [t.score for t in found.triples] == sorted((t.score for t in found.triples), reverse=True)
    [other] = read(predictor, text_of("the fox"), heads=("fox",), only=("eats",), closed=True, tails=("blue", "fox"))
    assert [t.tail for t in other.triples] == ["blue"]


def test_agreement_by_hand() -> None:
    gold = [Triple("Fox", "eats", "old owl"), Triple("fox", "sees", "bear"), Triple("owl", "sees", "red")]
    found = [
        ExtractedTriple("fox", "eats", "old  owl", -0.1), ExtractedTriple("FOX", "sees", "red", -0.2),
        ExtractedTriple("owl", "sees", "red", -0.3),
        ExtractedTriple("owl", "eats", "red", -0.4), ExtractedTriple("bear", "eats", "owl", -0.5),
    ]  # fmt: skip
    given = {("Fox", "eats"): "old owl", ("fox", "sees"): "red", ("owl", "sees"): None}
    agreement = Agreement(TOKENIZER, ExtractionRules(RULES, RELATIONS))
    agreement.add(DocumentTriples(text_of("fox", *gold), found, given))
    agreement.add(DocumentTriples(text_of("fox", *gold[:1]), [], {("Fox", "eats"): None}))
    summary = agreement.summary()
    assert (summary["documents"], summary["triples"], summary["gold"]) == (2, 5, 4)
    assert (summary["precision"], summary["recall"], summary["f1"]) == (2 / 5, 2 / 4, 4 / 9)
    assert summary["given"] == {"accuracy": 1 / 4, "pairs": 4, "asked": 2}
    assert (summary["best_f1"], summary["best_min_score"]) == (4 / 7, -0.3)  # 2 of 3 are correct, 4 are expected
    only = Agreement(TOKENIZER, ExtractionRules(RULES, RELATIONS, only=("eats",), min_score=-1))
    only.add(DocumentTriples(text_of("fox", *gold), found[:1], {("Fox", "eats"): "owl"}))
    assert only.summary()["recall"] == 1
    assert "best_f1" not in only.summary()
    nothing = Agreement(TOKENIZER, ExtractionRules(RULES, RELATIONS))
    nothing.add(DocumentTriples(text_of("fox"), found, {}))
    assert nothing.summary() == {"documents": 1, "triples": 5}


TEXTS = {
    "Anna": ("Berlin", "painter"), "Boris": ("Oslo", "baker"), "Clara": ("Rome", "nurse"),
    "Dario": ("Berlin", "pilot"), "Edith": ("Lima", "painter"), "Femke": ("Oslo", "judge"),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(home: Path) -> Path:
    """Writes texts of one sentence with two triples about the same head."""
    lines = []
    for name, (city, work) in TEXTS.items():
        triples = [{"head": name, "relation": "lives in", "tail": city}, {"head": name, "relation": "is", "tail": work}]
        lines.append({"id": name, "text": f"{name} came to {city} to be a {work}.", "triples": triples})
    return write_rows(home / "people.jsonl", lines)


@pytest.fixture(scope="module")
def run(home: Path, rows: Path) -> Path:
    return run_of(home / "run", rows, 180, model__leaves=2, data__vocab_size=360)


def extracted(run: Path, text: str | None = None, data: Path | None = None, **chosen: Any) -> Triples:
    request = ExtractRequest(ModelRequest(str(run)), text, str(data) if data else None, **chosen)
    return extract(request, pytest.fail, quiet)


@pytest.mark.long
def test_triples_learned_by_heart_are_found_in_their_texts(run: Path, rows: Path) -> None:
    triples = extracted(run, data=rows)
    found = list(triples)
    summary = triples.summary()
    assert summary["event"] == "extraction"
    assert (summary["documents"], summary["triples"], summary["gold"]) == (6, 12, 12)
    assert summary["f1"] > 0.9
    assert summary["given"]["accuracy"] > 0.9
    assert summary["best_f1"] >= summary["f1"]
    assert list(found[0]) == ["doc", "head", "relation", "tail", "score"]
    assert {key: found[0][key] for key in ("doc", "head")} == {"doc": "Anna", "head": "Anna"}
    assert all(row["score"] == round(row["score"], 4) <= 0 for row in found)


def test_closed_tails_are_all_that_were_trained_on(run: Path, rows: Path) -> None:
    triples = extracted(run, data=rows, closed=True)
    tails = {tail for pair in TEXTS.values() for tail in pair}
    assert {row["tail"] for row in triples} <= tails
    assert triples.summary()["f1"] > 0.9
    with pytest.raises(ConfigError, match="remove --closed"):
        extracted(run / "final", data=rows, closed=True)


def test_a_text_is_read_for_the_heads_and_relations_that_are_asked_for(run: Path) -> None:
    text = "Clara came to Rome to be a nurse."
    asked = list(extracted(run, text=text, heads=("Clara", "Nobody"), relations=("is",)))
    assert [(row["doc"], row["head"], row["relation"]) for row in asked] == [("text", "Clara", "is")]
    assert asked[0]["tail"] == "nurse"
    triples = extracted(run, text=text, relations=("is",))
    words = [row["head"] for row in triples]
    assert words[:1] == ["Clara"]
    assert len(words) == len(dict.fromkeys(words)) == triples.summary()["triples"]
    assert list(extracted(run / "final", text=text, heads=("Clara",), relations=("is",))) == asked


def test_what_cannot_be_read_is_refused_first(run: Path, rows: Path) -> None:
    with pytest.raises(ConfigError, match="either --text or --data"):
        extracted(run, text="a", data=rows)
    with pytest.raises(ConfigError, match="either --text or --data"):
        extracted(run)
    with pytest.raises(ConfigError, match="--text must not be empty"):
        extracted(run, text=" ")
    with pytest.raises(ConfigError, match=r"--relation eats is unknown to .*; choose from is, lives in"):
        extracted(run, text="a", relations=("eats",))

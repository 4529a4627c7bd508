"""Ranks of held-out tails are checked against plain loops and hand-computed values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from sansgpu.config import Config, ConfigError
from sansgpu.data.forms.graphs import GraphDocument, Triple
from sansgpu.jobs.evaluate import link_prediction
from sansgpu.jobs.train import TrainRequest, train
from sansgpu.tasks.graph import tail_prediction as gaps
from sansgpu.tasks.graph.batch import GraphBatch, MaskedExample
from sansgpu.tasks.graph.data import leafy_rules
from sansgpu.tasks.graph.leafy import LeafyExample, PlacedTriple, build_leafy
from sansgpu.tasks.graph.link_prediction import LinkPrediction
from sansgpu.tasks.graph.objective import GraphObjective
from sansgpu.tasks.graph.tail_prediction import TailPredictor, TailQuery
from sansgpu.tasks.graph.tokenizer import BERT, GraphCodec, MaskTokenizer
from sansgpu.tasks.graph.triples import KnownFacts
from sansgpu.train.loading import ModelRequest
from tests.processes import overrides

CPU = torch.device("cpu")
LEAVES = 3
ANIMALS = ["fox", "owl", "bear", "toad", "hare", "newt", "crow", "deer"]
COLORS, PLACES = ["red", "brown", "black", "green", "grey"], ["the forest", "a pond", "the high hills"]
SHAPE = {"d_model": 32, "n_heads": 2, "n_layers": 2, "d_ff": 64, "max_seq_len": 32, "leaves": LEAVES}
STILL = {"dropout": 0, "attention_dropout": 0, "relation_dropout": 0}


def words_tokenizer(*texts: str) -> MaskTokenizer:
    """A tokenizer with one token per word."""
    words = dict.fromkeys([*BERT, *(word for text in texts for word in text.split())])
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, BERT.unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(BERT))
    return MaskTokenizer(backend, "words")


def untrained(tokenizer: MaskTokenizer, relations: int, **shape: object) -> GraphObjective:
    """Returns an untrained model with weights scaled up, because otherwise all scores would be nearly equal."""
    model = {**SHAPE, **STILL, "vocab_size": tokenizer.vocab_size, "n_relations": relations, **shape}
    objective = GraphObjective(Config.model_validate({"task": "graph", "model": model}))
    with torch.no_grad():
        for parameter in objective.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    objective.model.eval()
    return objective


def quiet(*said: object) -> None:
    """Discards progress reports."""


class World:
    """A small knowledge graph with special cases: equal names, a text without the head, a name that is too long."""

    def __init__(self) -> None:
        draws = np.random.default_rng(1)
        names = [f"w{n}" for n in range(9)]
        entities = [(f"e{n}", " ".join(draws.choice(names, 1 + n % 3))) for n in range(24)]
        entities += [("twin1", entities[4][1]), ("twin2", entities[4][1]), ("long", "w1 w2 w3 w4")]
        self.relations = ["r1", "r2"]

        def triple(head: int, relation: str, tail: int) -> Triple:
            (head_id, head_name), (tail_id, tail_name) = entities[head], entities[tail]
            return Triple(head_name, relation, tail_name, None, head_id, tail_id)

        def document(head: int, *triples: Triple) -> GraphDocument:
            return GraphDocument(f"d{head}", f"d{head}", f"{entities[head][1]} is w0 of w7", triples)

        self.trained = [
            document(head, *(triple(head, f"r{1 + int(draws.integers(2))}", int(draws.integers(27))) for _ in range(3)))
            for head in range(20)
        ]
        held = [document(h, triple(h, "r1", 4), triple(h, "r1", 24), triple(h, "r2", 24 - h)) for h in range(12)]
        self.held = [
            *held,
            document(3, triple(3, "r1", 26), triple(3, "r9", 2)),
            GraphDocument("lost", "lost", "nothing of it", (triple(5, "r2", 7),)),
        ]
        texts = [d.text for d in (*self.trained, *self.held)]
        self.tokenizer = words_tokenizer(*texts, *names)
        self.objective = untrained(self.tokenizer, len(self.relations))
        self.known = KnownFacts(self.trained, self.held)

    @property
    def ranking(self) -> LinkPrediction:
        predictor = TailPredictor(self.objective, self.tokenizer.mask_id, CPU)
        codec = GraphCodec(self.tokenizer, tuple(self.relations))
        return LinkPrediction(predictor, codec, leafy_rules(self.objective.config), self.known)

    def log_probabilities(self, question: TailQuery, length: int) -> np.ndarray:
        """Returns log-probabilities (length, V) of masked leaves in fp64, computed for this question alone."""
        leaves = np.full(length, self.tokenizer.mask_id)
        placed = PlacedTriple(question.root, question.head_length, question.relation, leaves, Triple("", "", ""))
        graph = LeafyExample(question.tokens, np.zeros(0, bool), [placed])
        tokens = np.concatenate([question.tokens, leaves])
        batch = GraphBatch.of(
            [graph], [MaskedExample(tokens, np.full(len(tokens), -100), np.zeros((len(tokens), 2), int))]
        )
        with torch.no_grad():
            logits = self.objective.model.logits(self.objective.states(batch)[len(question.tokens) :])
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    def ranks(self) -> list[tuple[str, float]]:
        """Returns the relation and the rank of every held-out triple, computed one candidate at a time."""
        triples = [t for d in (*self.trained, *self.held) for t in d.triples]
        entities = sorted({(t.head_id, t.head) for t in triples} | {(t.tail_id, t.tail) for t in triples})
        true = {t.key for t in triples}
        found = []
        for document in self.held:
            for triple in document.triples:
                graphs = build_leafy(
                    [document._replace(triples=(triple,))],
                    self.tokenizer,
                    self.relations,
                    leafy_rules(self.objective.config),
                )
                if not graphs.triples:
                    found.append((triple.relation, (len(entities) + 1) / 2))
                    continue
                placed = graphs.example(0).placed[0]
                question = TailQuery(graphs.example(0).tokens, placed.root, placed.head_length, placed.relation)
                said = {length: self.log_probabilities(question, length) for length in range(1, LEAVES + 1)}
                scores = {}
                for key, name in entities:
                    ids = self.tokenizer.encode_names([name])[0]
                    known = (triple.head_id, triple.relation, key) in true and key != triple.tail_id
                    if 1 <= len(ids) <= LEAVES and not known:
                        scores[key] = sum(said[len(ids)][k, token] for k, token in enumerate(ids)) / len(ids)
                gold = scores.pop(triple.tail_id)
                better = sum(score > gold + 1e-9 for score in scores.values())
                equal = sum(abs(score - gold) <= 1e-9 for score in scores.values())
                found.append((triple.relation, 1 + better + equal / 2))
        return found


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_ranks_are_those_of_plain_loops(world: World) -> None:
    report = world.ranking.report(world.held, inverse=False, limit=None, progress=quiet)["tail"]
    expected = world.ranks()
    ranks = np.array([rank for _, rank in expected])
    assert any(rank % 1 for rank in ranks), "no candidates tie, so ties are not tested"
    assert report["mrr"] == pytest.approx((1 / ranks).mean(), rel=1e-9)
    assert [report[f"hits_at_{k}"] for k in (1, 3, 10)] == [float((ranks <= k).mean()) for k in (1, 3, 10)]
    for name in ("r1", "r2", "r9"):
        own = np.array([rank for relation, rank in expected if relation == name])
        assert report["relations"][name]["mrr"] == pytest.approx((1 / own).mean(), rel=1e-9)
        assert report["relations"][name]["queries"] == len(own)


def test_triples_that_cannot_be_queried_count_as_random_guesses(world: World) -> None:
    report = world.ranking.report(world.held, inverse=False, limit=None, progress=quiet)["tail"]
    queries = sum(len(d.triples) for d in world.held)
    assert report["queries"] == queries
    assert report["covered"] == (queries - 3) / queries  # except long tail, unknown relation, missing head
    entities = report["candidates"]
    assert report["relations"]["r9"]["mrr"] == 2 / (entities + 1)
    assert report["random_mrr"] == pytest.approx((math.log(entities) + 0.5772) / entities)


def test_no_cut_into_batches_changes_a_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = world.ranking.report(world.held, inverse=False, limit=None, progress=quiet)

    def pieces(name: str, value: int) -> list[tuple[int, int]]:
        """Records (questions done, total) of each progress call."""
        monkeypatch.setattr(gaps, name, value)
        told: list[tuple[int, int]] = []
        assert (
            world.ranking.report(world.held, False, None, lambda _, done, total, unit: told.append((done, total)))
            == whole
        )
        return told

    some, single = pieces("MAX_NODES", 30), pieces("MAX_VALUES", 1)
    asked = some[-1][1]
    assert 1 < len(some) < len(single) == asked
    assert some[-1] == single[-1] == (asked, asked)


def test_questions_asked_together_are_answered_as_each_alone(world: World) -> None:
    predictor = TailPredictor(world.objective, world.tokenizer.mask_id, CPU)
    tokens = [np.array([2, *range(5, 5 + n), 3]) for n in (4, 9, 6)]
    questions = [TailQuery(t, 1 + n, 1 + n, 1 + n % 2) for n, t in enumerate(tokens)]
    leaves = np.array([[4, 4], [6, 4], [7, 8]])
    together = predictor.log_probabilities(questions, leaves)
    alone = [predictor.log_probabilities([q], leaves[n : n + 1])[0] for n, q in enumerate(questions)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predictor.log_probabilities(questions, leaves, slice(1, 2)), together[:, 1:])
    assert together.exp().sum(dim=-1).numpy() == pytest.approx(1, abs=1e-5)


def test_relation_frequency_by_hand() -> None:
    def said(head: str, *tails: str) -> GraphDocument:
        return GraphDocument(head, head, f"{head} is here", tuple(Triple(head, "likes", tail) for tail in tails))

    trained = [said("h1", "a", "b"), said("h2", "a", "b"), said("h3", "a", "c"), said("h4", "a")]
    held = [said("h5", "b", "a", "h1"), said("h3", "b")]
    # Tail counts: a 4, b 2, c 1, h1 .. h5 0. Other known tails are filtered out. Query h5: b and a rank first; h1 comes
    # after c and ties with h2 .. h5, so its rank is the mean of 2 to 6. Query h3: b ranks first without a and c.
    ranks = [1, 1, 2 + 4 / 2, 1]
    tokenizer = words_tokenizer("a b c h1 h2 h3 h4 h5 is here")
    objective = untrained(tokenizer, 1)
    predictor, rules = TailPredictor(objective, tokenizer.mask_id, CPU), leafy_rules(objective.config)
    report = LinkPrediction(predictor, GraphCodec(tokenizer, ("likes",)), rules, KnownFacts(trained, held)).report(
        held, False, None, quiet
    )
    expected = sum(1 / rank for rank in ranks) / len(ranks)
    assert report["tail"]["relation_frequency_mrr"] == pytest.approx(expected)
    assert report["tail"]["relations"]["likes"]["relation_frequency_mrr"] == pytest.approx(expected)
    assert report["tail"]["trained_on"] == 0
    untold = LinkPrediction(predictor, GraphCodec(tokenizer, ("likes",)), rules, KnownFacts([], held))
    without = untold.report(held, False, None, quiet)
    assert "relation_frequency_mrr" not in without["tail"]


def test_an_untrained_model_ranks_at_random() -> None:
    draws, count = np.random.default_rng(0), 200
    names = [f"{first} {second}" if n % 2 else f"{first}{second}" for n, (first, second) in enumerate(
        (f"a{n % 20}", f"b{n // 20}") for n in range(count)
    )]  # fmt: skip
    tails = draws.permutation(count)
    documents = [
        GraphDocument(name, name, f"{name} and more", (Triple(name, "r", names[tails[n]]),))
        for n, name in enumerate(names)
    ]
    tokenizer = words_tokenizer(*names, "and more")
    objective = untrained(tokenizer, 1)
    predictor, rules = TailPredictor(objective, tokenizer.mask_id, CPU), leafy_rules(objective.config)
    report = LinkPrediction(predictor, GraphCodec(tokenizer, ("r",)), rules, KnownFacts([], documents)).report(
        documents, False, None, quiet
    )
    inverse_ranks = 1 / np.arange(1, count + 1)
    noise = inverse_ranks.std() / count**0.5
    assert report["tail"]["covered"] == 1
    assert abs(report["tail"]["mrr"] - report["tail"]["random_mrr"]) < 3 * noise
    assert abs(report["tail"]["hits_at_10"] - 10 / count) < 0.06


def run_of(folder: Path, dataset: Path, steps: int, **changes: object) -> Path:
    """Trains a tiny graph encoder that memorizes its few triples, and returns the run's folder."""
    chosen = {
        "task": "graph", "data.dataset_name": dataset, "data.validation_name": dataset, "data.vocab_size": 320,
        **{f"model.{key}": value for key, value in {**SHAPE, **STILL, "d_model": 48}.items()},
        "data.leaf_mask_ratio": 1, "training.batch_size": 12, "training.gradient_accumulation_steps": 1,
        "training.max_steps": steps, "training.learning_rate": 0.004, "training.warmup_steps": 10,
        "training.weight_decay": 0, "training.save_steps": 0, "training.eval_steps": 0, "training.precision": "fp32",
        "training.compile": "off", "training.report_to": "none", "training.threads": 1, "device": "cpu",
    }  # fmt: skip
    train(TrainRequest(None, tuple(overrides(chosen, changes)), folder), [], quiet)
    return folder


def knowledge(folder: Path) -> Path:
    """Writes a folder with facts about animals, and returns it."""
    folder.mkdir()
    facts = [(a, "has_colour", COLORS[n * 3 % 5]) for n, a in enumerate(ANIMALS)]
    facts += [(a, "lives_in", PLACES[n * 2 % 3]) for n, a in enumerate(ANIMALS)]
    texts = [(a, f"{a}, an animal that people call {a}") for a in ANIMALS] + [(n, n) for n in (*COLORS, *PLACES)]
    for name, rows in (("train.tsv", facts), ("entity2text.txt", texts)):
        (folder / name).write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    return run_of(home / "run", knowledge(home / "kg"), 160, data__inverse_relations=True, model__leaves=5)


def predicted(target: Path, data: Path | None, limit: int | None = None) -> dict[str, Any]:
    return link_prediction(ModelRequest(str(target)), str(data) if data else None, limit, quiet, pytest.fail)


@pytest.mark.long
def test_facts_learned_by_heart_are_ranked_first(home: Path, run: Path) -> None:
    report = predicted(run, home / "kg")
    assert report["event"] == "link_prediction"
    assert report["step"] == 160
    for side in ("tail", "head"):
        assert report[side]["mrr"] > 0.9
        assert (report[side]["queries"], report[side]["covered"], report[side]["trained_on"]) == (16, 1, 1)
        assert report[side]["relation_frequency_mrr"] < 0.6
    assert list(report["head"]["relations"]) == ["inverse of has colour", "inverse of lives in"]


def test_a_limit_takes_the_same_few_of_each_side(home: Path, run: Path) -> None:
    few = predicted(run, home / "kg", limit=5)
    assert [few[side]["queries"] for side in ("tail", "head")] == [5, 5]
    assert predicted(run, home / "kg", limit=5) == few
    assert predicted(run, home / "kg", limit=16) == predicted(run, home / "kg")


def test_training_triples_are_not_ranked_for_the_runs_own_data(run: Path) -> None:
    with pytest.raises(ConfigError, match="has no triples to rank"):
        predicted(run, None)


def test_link_prediction_uses_the_runs_own_test_split(home: Path) -> None:
    folder = knowledge(home / "parted")
    facts = (folder / "train.tsv").read_text("utf-8").splitlines(keepends=True)
    (folder / "train.tsv").write_text("".join(facts[2:]), "utf-8")
    (folder / "valid.tsv").write_text(facts[0], "utf-8")
    (folder / "test.tsv").write_text("".join(facts[:2]), "utf-8")
    report = predicted(run_of(home / "own", folder, 1, data__validation_name="null", model__leaves=5), None)
    assert list(report) == ["event", "step", "tail"]
    assert (report["tail"]["queries"], report["tail"]["trained_on"]) == (2, 0)
    assert report["tail"]["candidates"] == len(ANIMALS) + len(COLORS) + len(PLACES)


def test_an_exported_folder_needs_data_and_ranks_as_its_run(home: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match="has no triples; pass a dataset with --data"):
        predicted(run / "final", None)
    exported, trained = predicted(run / "final", home / "kg"), predicted(run, home / "kg")
    assert exported["step"] is None
    assert exported["tail"]["covered"] == 1
    assert exported["tail"]["mrr"] == pytest.approx(trained["tail"]["mrr"])


def test_a_model_of_text_alone_is_refused(home: Path) -> None:
    (home / "texts.jsonl").write_text('{"text": "a fox is red"}\n{"text": "an owl is brown"}\n', "utf-8")
    changes = {"model__relation_dropout": 0.3, "data__leaf_mask_ratio": 0.15, "data__mask_ratio": 0.5}
    plain = run_of(home / "plain", home / "texts.jsonl", 1, model__leaves=0, **changes)
    with pytest.raises(ConfigError, match="was trained without triples"):
        predicted(plain, home / "kg")


def test_a_file_of_triples_needs_no_header(home: Path, run: Path) -> None:
    rows = [line.split("\t") for line in (home / "kg/train.tsv").read_text("utf-8").splitlines()]
    names = {"has_colour": "has colour", "lives_in": "lives in"}
    bare, headed = home / "bare.tsv", home / "headed.tsv"
    bare.write_text("".join(f"{head}\t{names[relation]}\t{tail}\n" for head, relation, tail in rows), "utf-8")
    headed.write_text("head\trelation\ttail\n" + bare.read_text("utf-8"), "utf-8")
    said: list[str] = []
    report = link_prediction(ModelRequest(str(run)), str(bare), None, quiet, said.append)
    assert report == predicted(run, headed)
    assert report["tail"]["mrr"] > 0.9
    assert said[-1].startswith(f"{bare}: its first line is a triple")

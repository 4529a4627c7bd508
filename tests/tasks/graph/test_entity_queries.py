"""Queries for entities: their masks, losses, gradients and candidates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sansgpu.config import Config
from sansgpu.data.forms.graphs import Entity
from sansgpu.tasks.graph.batch import HEAD_ENTITY, QUERY_TAIL, RELATION, TAIL_START, add_entity_queries
from sansgpu.tasks.graph.data import GraphCorpus
from sansgpu.tasks.graph.masked_prediction import mask_rules
from sansgpu.tasks.graph.tail_prediction import EntityCandidates, EntityTableIndex, TailPredictor, TailQuery
from sansgpu.tasks.graph.task import Graph
from tests.tasks.graph.entities import corpus_of, write_facts

STILL = {"model__dropout": 0, "model__attention_dropout": 0, "model__relation_dropout": 0}


def fill(home: Path) -> None:
    write_facts(home)


def test_a_query_shows_one_masked_leaf_whatever_the_tail(home: Path) -> None:
    config, corpus = corpus_of(home, data__entity_query_ratio=1)
    rules = mask_rules(config, corpus.codec.tokenizer)
    shown = [
        add_entity_queries(corpus.train.example(number), rules, 0, 0, number) for number in range(len(corpus.train))
    ]
    placed = [p for example in shown for p in example.placed]
    assert {tuple(p.tail) for p in placed} == {(rules.mask_id,)}
    assert len({len(p.tail) for example in corpus.train.examples for p in example[1]}) > 1
    names = [corpus.codec.entities[p.entities[1] - 1].name for p in placed]
    assert names == [p.triple.tail for p in placed]
    some = mask_rules(*_ratio(config, 0.5), corpus.codec.tokenizer)
    asked = [
        p.is_query for n in range(len(shown)) for p in add_entity_queries(corpus.train.example(n), some, 0, 1, n).placed
    ]
    assert 0.4 < np.mean(asked) < 0.6


def _ratio(config: Config, ratio: float) -> tuple[Config]:
    return (config.model_copy(update={"data": config.data.model_copy(update={"entity_query_ratio": ratio})}),)


def plain_vectors(task: Graph, corpus: GraphCorpus) -> torch.Tensor:
    """Returns entity vectors (E, D) in fp64: the mean embedding of the name's tokens plus the projected own vector."""
    table, embedding = task.model.entities, task.model.embedding.weight.double()
    assert table is not None
    own = table.own.weight[1:].double() @ table.project.weight.double().T
    names = torch.stack([embedding[tokens].mean(0) for tokens in corpus.entity_names])
    return own[: len(names)] + names


def complex_tails(task: Graph, heads: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
    """Returns the normalized ComplEx products (M, D) in fp64 of heads (M, D) and relations (M,)."""
    table = task.model.entities
    assert table is not None
    turned = [torch.complex(*x.chunk(2, dim=1)) for x in (heads, table.relation.weight[relations].double())]
    product = turned[0] * turned[1]
    tails = torch.cat((product.real, product.imag), dim=1)
    norm = table.tail_norm
    return torch.nn.functional.layer_norm(tails, tails.shape[1:], norm.weight.double(), norm.bias.double(), norm.eps)


def mean_loss(logits: torch.Tensor, numbers: torch.Tensor) -> float:
    """Returns the mean cross-entropy over all entities; entity ids start at 1."""
    return float(torch.nn.functional.cross_entropy(logits, numbers - 1))


@torch.no_grad()
def test_losses_over_entities_are_those_of_a_plain_softmax(home: Path) -> None:
    config, corpus = corpus_of(
        home, **STILL, data__mask_ratio=0, data__leaf_mask_ratio=0, data__entity_query_ratio=1, model__n_entities=40
    )
    task = Graph(config, corpus, 8)
    table = task.model.entities
    assert table is not None
    table.tail_norm.weight.uniform_(0.5, 2)
    table.tail_norm.bias.uniform_(-1, 1)
    batch = task.batch(0)
    assert (batch.queries, batch.fact_count, batch.target_count()) == (8, 8 * config.data.kge_triples, 40)
    triples, vectors = batch.placed_triples(), plain_vectors(task, corpus)
    known = triples[:, HEAD_ENTITY] > 0
    assert known.any()
    tails = complex_tails(task, vectors[(triples[:, HEAD_ENTITY] - 1).clamp(min=0)], triples[:, RELATION])
    predicted = (
        task.model.predicted(task.objective.states(batch)[triples[:, TAIL_START]]).double() + tails * known[:, None]
    )
    of_queries = mean_loss(predicted @ vectors.T, triples[:, QUERY_TAIL])
    head, relation, tail = batch.facts.flatten(0, 1).T
    of_facts = mean_loss(complex_tails(task, vectors[head - 1], relation) @ vectors.T, tail)
    loss = float(task.loss(batch)) / batch.target_count()
    assert loss == pytest.approx(of_queries + of_facts, rel=1e-4)
    metrics = task.step_metrics(task.step_sums())
    assert (metrics["entity_loss"], metrics["kge_loss"]) == (
        pytest.approx(of_queries, rel=1e-4),
        pytest.approx(of_facts, rel=1e-4),
    )


def test_facts_are_training_triples_and_differ_from_epoch_to_epoch(home: Path) -> None:
    config, corpus = corpus_of(home, data__kge_triples=3)
    task = Graph(config, corpus, len(corpus.train))
    names = [entity.name for entity in corpus.codec.entities]
    lines = [line.split("\t") for line in (home / "graph" / "train.tsv").read_text().splitlines()]
    trained = {(head, relation.replace("_", " "), tail) for head, relation, tail in lines}
    epochs = [task.batch(step).facts for step in (0, 1)]
    for facts_drawn in epochs:
        assert facts_drawn.shape == (len(corpus.train), 3, 3)
        said = {
            (names[h - 1], corpus.codec.relations[r - 1], names[t - 1])
            for h, r, t in facts_drawn.flatten(0, 1).tolist()
        }
        assert said <= trained
        assert len(said) > 0.8 * len(trained)
    assert not torch.equal(*epochs)
    assert not any(batch.fact_count for batch in task.evaluator.validation_batches(8))


def test_one_batch_of_queries_in_pieces_gives_one_gradient(home: Path) -> None:
    config, corpus = corpus_of(home, **STILL, data__leaf_mask_ratio=0.9, training__entity_weight=0.7)
    gradients = []
    for size, ranks in ((12, 1), (5, 1), (1, 1), (2, 3)):
        task = Graph(config, corpus, 12)
        batch = task.batch(0)
        for rank in range(ranks):
            for piece in batch.micro_batches(size, rank, ranks):
                (task.loss(piece) / batch.target_count()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None]))
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_unknown_entities_are_known_by_their_names_and_equal_ones_share_a_score(home: Path) -> None:
    config, corpus = corpus_of(home, **STILL)
    task, codec = Graph(config, corpus, 8), corpus.codec
    task.model.eval()
    predictor = TailPredictor(task.objective, codec.tokenizer.mask_id, torch.device("cpu"))
    index = EntityTableIndex(codec.entities)
    known = codec.entities[3]
    asked = [known, Entity("x1", "unheard thing"), Entity("x2", "unheard thing"), Entity("x3", known.name)]
    candidates = EntityCandidates(predictor, codec.tokenizer, index, asked)
    example = corpus.train.example(0)
    placed = example.placed[0]
    question = TailQuery(example.tokens, placed.root, placed.head_length, placed.relation, placed.entities[0])
    scores = candidates.scores(predictor, [question])[0][candidates.column].numpy()
    assert candidates.column.tolist() == [0, 1, 1, 0]  # an unknown id is matched by its name if that is unique
    assert np.exp(scores[:2]).sum() == pytest.approx(1, abs=1e-5)
    tails = candidates.best(candidates.scores(predictor, [question])[0].numpy(), 5, without=known.name)
    assert [tail.text for tail in tails] == ["unheard thing"]

"""Tests of tiny graph models: memorization, losses, gradients, masks and batches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sansgpu.data.batch import IGNORE
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.tasks.graph.batch import GraphBatch, mask_example
from sansgpu.tasks.graph.masked_prediction import mask_rules
from sansgpu.tasks.graph.objective import GraphObjective
from sansgpu.tasks.graph.task import Graph
from sansgpu.train.optim import Optimizer
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step
from tests.tasks.graph.graphs import filled, prepared, trained

EXECUTION = Execution(8)


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, object, object]:
    """A model trained to convergence on eight texts with their triples."""
    folder = tmp_path_factory.mktemp("memorised")
    config, corpus = prepared(
        folder, "training.learning_rate=0.003", "data.leaf_mask_ratio=0.5", "model.position_embedding=learned"
    )
    return trained(config, corpus, 280), config, corpus


@pytest.mark.long
def test_eight_texts_are_learned_by_heart(memorised: tuple[Graph, object, object]) -> None:
    metrics = filled(*memorised)  # type: ignore[arg-type]
    assert metrics["mlm_acc"] > 0.95
    assert metrics["mnm_acc"] > 0.95
    assert metrics["tail_acc"] > 0.95
    assert metrics["mlm_majority_acc"] < 0.3


def test_tails_are_predicted_from_their_relation_and_their_head(memorised: tuple[Graph, object, object]) -> None:
    task, config, corpus = memorised
    whole = filled(task, config, corpus, 1.0)["mnm_acc"]  # type: ignore[arg-type]
    other = [
        (window, [p._replace(relation=3 - p.relation) for p in placed])
        for window, placed in corpus.train.examples  # type: ignore[attr-defined]
    ]
    swapped = replace(corpus, train=replace(corpus.train, examples=other))  # type: ignore[type-var, attr-defined]
    assert filled(task, config, swapped, 1.0)["mnm_acc"] < whole - 0.3  # type: ignore[arg-type]
    apart = [(window, [p._replace(root=1) for p in placed]) for window, placed in corpus.train.examples]  # type: ignore[attr-defined]
    moved = replace(corpus, train=replace(corpus.train, examples=apart))  # type: ignore[type-var, attr-defined]
    assert filled(task, config, moved, 1.0)["mnm_acc"] < whole - 0.1  # type: ignore[arg-type]


def test_a_model_that_saw_no_leaves_cannot_fill_them(tmp_path: Path) -> None:
    config, corpus = prepared(tmp_path, "training.learning_rate=0.003", "data.leaf_mask_ratio=0")
    metrics = filled(trained(config, corpus, 60), config, corpus)
    assert metrics["mnm_acc"] < 0.3


def test_every_weight_is_trained(tmp_path: Path) -> None:
    changes = (
        "model.position_embedding=learned", "model.slot_embedding=true", "model.embedding_norm=true",
        "training.sbo_weight=1", "data.leaf_mask_ratio=1",
    )  # fmt: skip
    config, corpus = prepared(tmp_path, *changes)
    task = Graph(config, corpus, 8)
    optimizer = Optimizer(task.model, config.training, torch.float32)
    (task.loss(task.batch(0)) / 100).backward()
    named = dict(task.model.named_parameters())
    assert {w.name for w in optimizer.weights} == set(named)
    still = [w.name for w in optimizer.weights if w.gradient is None or not bool(w.gradient.abs().sum() > 0)]
    assert [name for name in still if not name.endswith("attention.k.bias")] == []  # it adds the same to all logits


def test_no_relation_stays_zero(tmp_path: Path) -> None:
    config, corpus = prepared(tmp_path, "training.weight_decay=0.1")
    task = trained(config, corpus, 5)
    assert task.model.fusion is not None
    for table in (task.model.fusion.matrix, task.model.fusion.attention):
        assert not bool(table.weight[0].any())


def test_a_masked_tail_cannot_be_seen(tmp_path: Path) -> None:
    """The logits of leaves and roots do not depend on the masked tokens."""
    config, corpus = prepared(tmp_path)
    task = Graph(config, corpus, 8)
    task.model.eval()
    rules = replace(mask_rules(config, corpus.codec.tokenizer), leaf_ratio=1.0, ratio=0.0)
    example = corpus.train.example(0)
    (placed,) = example.placed
    found = []
    for tail in (placed.tail, (placed.tail + 7) % 300):
        changed = example._replace(placed=[placed._replace(tail=tail)])
        shown = mask_example(changed, rules, 0, 0, 0)
        hidden = np.where(shown.targets == IGNORE, shown.tokens, rules.mask_id)  # never the original token
        batch = GraphBatch.of([changed], [shown._replace(tokens=hidden)])
        found.append(task.objective.states(batch))
    assert torch.equal(*found)


@pytest.mark.parametrize("reduction", ["separate", "pooled"])
def test_one_batch_in_pieces_gives_one_gradient(tmp_path: Path, reduction: str) -> None:
    changes = (f"training.mnm_reduction={reduction}", "training.sbo_weight=0.5", "training.mnm_weight=0.7")
    config, corpus = prepared(tmp_path, *changes, "data.leaf_mask_ratio=0.5")
    gradients = []
    for size in (8, 2, 1):
        task = Graph(config, corpus, 8)
        batch = task.batch(0)
        for piece in batch.micro_batches(size):
            (task.loss(piece) / batch.target_count()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None]))
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_losses_are_means_over_tokens_and_over_leaves(tmp_path: Path) -> None:
    config, corpus = prepared(tmp_path, "training.mnm_weight=0.7", "data.leaf_mask_ratio=0.5")
    task = Graph(config, corpus, 8)
    batch = task.batch(0)
    loss = float(task.loss(batch)) / batch.target_count()
    said = task.step_metrics(task.step_sums())
    assert loss == pytest.approx(said["mlm_loss"] + 0.7 * said["mnm_loss"], rel=1e-5)
    assert (said["mlm_count"], said["mnm_count"]) == batch.counts()
    vocabulary = config.model.vocab_size or 0
    assert said["mlm_loss"] == pytest.approx(np.log(vocabulary), rel=0.05)  # untrained, so nearly uniform
    pooled = task.loss(batch.weighed(1.0, 1.0, pooled=True)) / batch.target_count()
    roots, leaves = batch.counts()
    mean = (said["mlm_loss"] * roots + said["mnm_loss"] * leaves) / (roots + leaves)
    assert float(pooled) == pytest.approx(mean, rel=1e-5)
    assert task.step_sums() != {}
    assert task.step_sums() == {}


def test_the_weight_of_the_leaf_loss_increases(tmp_path: Path) -> None:
    config, corpus = prepared(tmp_path, "training.mnm_ramp_steps=4", "training.mnm_reduction=pooled")
    task = Graph(config, corpus, 8)
    assert [task.batch(step).weights[1] for step in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]


def test_a_batch_is_a_function_of_its_step(tmp_path: Path) -> None:
    config, corpus = prepared(tmp_path)
    one, other = Graph(config, corpus, 3), Graph(config, corpus, 3)
    other.batch(5)
    first, second = one.batch(7), other.batch(7)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.targets, second.targets)
    assert not torch.equal(first.targets, one.batch(8).targets)


def test_a_step_without_any_gap_learns_nothing_and_is_no_error(tmp_path: Path) -> None:
    config, corpus = prepared(tmp_path, "data.mask_ratio=0", "data.leaf_mask_ratio=0.0001")
    task = Graph(config, corpus, effective_batch(config.training))
    state = TrainState.create(task.model, config.training, EXECUTION)
    result = train_step(state, task, task.batch(0), 0.1)
    assert result.loss_sum == 0.0


@pytest.mark.parametrize("mode", ["multiply_logits", "additive_log"])
def test_random_batches_are_as_large_as_asked(mode: str, tmp_path: Path) -> None:
    config, _ = prepared(tmp_path, f"model.decay={mode}", "data.min_leaf_groups=1", "model.leaves=3")
    full = Graph.random_batch(config, 2)
    assert full.token_count() == 2 * config.window == 2 * 40 * 4
    assert Graph.random_batch(config, 3, 50).lengths.tolist() == [50] * 3
    assert torch.isfinite(GraphObjective(config).loss(full))

"""Ablations of the graph encoder and its training.

    python -m benchmarks.graph.ablations [--config FILE] [--set KEY=VALUE] [--steps 400] [--json FILE]

Trains the same model with one change at a time, on the same examples in the same order with the same masks, and
evaluates each on the same held-out split. Without leaves, only text tokens are masked in training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contest import Row, print_table, say, write_json
from sansgpu.config import Config
from sansgpu.kernels.library import load_kernels_and_allocators
from sansgpu.kernels.roofline import resolve_precision
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.machine.probe import resolve_threads
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.graph.data import GraphCorpus
from sansgpu.tasks.graph.leafy import LeafyDataset
from sansgpu.tasks.graph.settings import GraphModelConfig
from sansgpu.tasks.graph.task import Graph
from sansgpu.train.evaluate import evaluate
from sansgpu.train.optim import choose_optimizer
from sansgpu.train.schedule import learning_rate
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step

MICRO_BATCH = 32
COLUMNS = {
    "": ("name", "s"),
    "masked tokens right": ("mlm_acc", ".2%"),
    "masked leaves right": ("mnm_acc", ".2%"),
    "whole tails right": ("tail_acc", ".2%"),
    "loss of tokens": ("mlm_loss", ".3f"),
    "loss of leaves": ("mnm_loss", ".3f"),
}


@dataclass(frozen=True)
class Variant:
    """A model or dataset with one change."""

    name: str
    changes: dict[str, Any]
    shuffled: bool = False  # random relations in the training split
    bare: bool = False  # no triples in the training split


def variants(config: Config) -> list[Variant]:
    """Returns the configured model and all its variants."""
    model = GraphModelConfig.of(config)
    found = [Variant("as configured", {})]
    found.append(Variant("relations shuffled in training", {}, shuffled=True))
    found.append(Variant("no leaves in training", {}, bare=True))
    found.append(Variant("no H-GAT fusion", {"fusion": "none"}))
    found.append(Variant("no decay", {"decay": "none"}))
    for decay in ("multiply_logits", "additive_log"):
        if decay != model.decay:
            found.append(Variant(f"decay {decay}", {"decay": decay}))
    if model.position_embedding != "none":
        found.append(Variant("no positions", {"position_embedding": "none"}))
    if model.slot_embedding:
        found.append(Variant("slots not told apart", {"slot_embedding": False}))
    return found


def shuffled(graphs: LeafyDataset, relations: int) -> LeafyDataset:
    """Returns the same graphs, with the relation of each triple replaced by a random one."""
    draws = np.random.Generator(np.random.PCG64(0))
    examples = [
        (window, [p._replace(relation=1 + int(draws.integers(relations))) for p in placed])
        for window, placed in graphs.examples
    ]
    return replace(graphs, examples=examples)


def bare(graphs: LeafyDataset) -> LeafyDataset:
    """Returns the same windows in the same order, without triples."""
    return replace(graphs, examples=[(window, []) for window, _ in graphs.examples])


def measured(variant: Variant, config: Config, corpus: GraphCorpus, steps: int, execution: Execution) -> Row:
    """Trains and evaluates a variant."""
    config = config.model_copy(update={"model": config.model.model_copy(update=variant.changes)})
    train = corpus.train
    if variant.shuffled:
        train = shuffled(train, len(corpus.codec.relations))
    if variant.bare:
        train = bare(train)
    training = config.training
    task = Graph(config, replace(corpus, train=train), effective_batch(training))
    state = TrainState.create(task.model, training, execution)
    for step in range(steps):
        rate = learning_rate(training, step, steps)
        train_step(state, task, task.batch(step), rate)
        state.progress.step += 1
    metrics = evaluate(task.evaluator, execution)
    assert metrics is not None
    state.optimizer.release_state()
    return {"name": variant.name, **metrics}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/graph_small.yaml"))
    parser.add_argument("--set", action="append", default=[], dest="changes", help="key.path=value")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    config, _ = load_config(args.config, args.changes)
    cache, device = cache_dir(None), torch.device("cpu")
    torch.set_num_threads(resolve_threads(config.training))
    torch.set_flush_denormal(True)
    load_kernels_and_allocators(config.training.kernels, device, True, say)
    config, corpus = Graph.prepare(config, cache, lambda *_: None)
    training = config.training
    work = Graph.costs(config).work(effective_batch(training) * corpus.example_tokens)
    optimizer = choose_optimizer(training.optimizer, work.needed, work.muon)
    config = config.model_copy(update={"training": training.model_copy(update={"optimizer": optimizer})})
    execution = Execution(MICRO_BATCH, precision=resolve_precision(config.training, device), device=device)
    rows = []
    for variant in variants(config):
        print(variant.name, file=sys.stderr, flush=True)
        rows.append(measured(variant, config, corpus, args.steps, execution))
    print_table(f"{args.config.name}, {args.steps} steps", COLUMNS, rows)
    write_json(args.json, "graph_ablations", {**vars(args), "config": str(args.config)}, rows)


if __name__ == "__main__":
    main()

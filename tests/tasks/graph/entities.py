"""A small knowledge graph, and settings of tiny runs on it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.graph.small_graph import facts, write_graph

from sansgpu.config import Config
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.graph.data import GraphCorpus
from sansgpu.tasks.graph.task import Graph
from tests.processes import options, overrides

TINY = {
    "task": "graph", "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 2, "model.d_ff": 64,
    "model.max_seq_len": 24, "data.vocab_size": 400, "training.batch_size": 16,
    "training.gradient_accumulation_steps": 1, "training.max_steps": 2, "training.eval_steps": 2,
    "training.save_steps": 2, "training.logging_steps": 1, "training.precision": "fp32", "training.compile": "off",
    "training.report_to": "none", "training.threads": 1, "device": "cpu",
}  # fmt: skip
FACTS = facts(entities=40, relations=8, block=25)


def write_facts(home: Path) -> Path:
    return write_graph(home / "graph", FACTS)


def settings(home: Path, **changes: object) -> list[str]:
    return options(TINY, {"data.dataset_name": home / "graph"}, changes)


def corpus_of(home: Path, **changes: object) -> tuple[Config, GraphCorpus]:
    config, _ = load_config(None, overrides(TINY, {"data.dataset_name": home / "graph"}, changes))
    return Graph.prepare(config, home / "cache", lambda *_: None)

"""Tiny texts with triples, and tiny encoders trained on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from sansgpu.config import Config
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.graph.data import GraphCorpus
from sansgpu.tasks.graph.masked_prediction import MaskedEvaluation, Masking, majority_of, mask_rules
from sansgpu.tasks.graph.task import Graph
from sansgpu.train.evaluate import evaluate
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step
from tests.processes import write_rows

DRUGS = (
    "metformin",
    "aspirin",
    "insulin",
    "ibuprofen",
    "penicillin",
    "morphine",
    "caffeine",
    "warfarin",
    "quinine",
    "digoxin",
)
ILLS = ("diabetes", "pain", "sugar", "fever", "infection", "grief", "sleep", "clots", "malaria", "flutter")
PLACES = ("liver", "blood", "muscle", "joints", "lung", "brain", "heart", "vein", "marrow", "valve")
BEASTS = ("horse", "goat", "lamb", "camel", "otter", "raven", "trout", "beetle", "gecko", "heron")
COLORS = ("amber", "azure", "black", "coral", "green", "ivory", "olive", "pink", "teal", "white")
TOOLS = ("spoon", "flask", "drill", "knife", "brush", "clamp", "funnel", "needle", "syringe", "tube")


def rows(count: int = 10) -> list[dict[str, Any]]:
    """Returns texts, each with two triples that have the same head and differ in relation and tail."""
    found = []
    for number in range(count):
        names = (DRUGS, ILLS, PLACES, BEASTS, COLORS, TOOLS)
        drug, ill, place, beast, color, tool = (words[number % len(words)] for words in names)
        triples = [
            {"head": f"{drug} acid", "relation": "treats", "tail": ill},
            {"head": f"{drug} acid", "relation": "acts on", "tail": place},
        ]
        text = f"note {number} : {drug} acid was given to the {beast} by a {tool} in the {color} {number}"
        found.append({"id": f"d{number}", "text": text, "triples": triples})
    return found


SETTINGS = [
    "task=graph", "model.d_model=64", "model.n_heads=2", "model.n_layers=2", "model.d_ff=128", "model.max_seq_len=40",
    "model.dropout=0", "model.attention_dropout=0", "model.relation_dropout=0", "data.vocab_size=512",
    "training.batch_size=8", "training.gradient_accumulation_steps=1", "training.precision=fp32",
    "training.compile=off", "training.threads=1", "training.warmup_steps=10", "training.lr_scheduler=constant",
    "training.optimizer=adamw",
    "data.validation_split=0.2",
]  # fmt: skip


def prepared(tmp_path: Path, *changes: str, count: int = 10) -> tuple[Config, GraphCorpus]:
    """Returns the configuration and the prepared corpus of a tiny model."""
    data = write_rows(tmp_path / "rows.jsonl", rows(count))
    config, _ = load_config(None, [*SETTINGS, f"data.dataset_name={data}", *changes])
    return Graph.prepare(config, tmp_path / "cache", lambda *_: None)


def trained(config: Config, corpus: GraphCorpus, steps: int) -> Graph:
    """Returns a model after some training steps on the batches of the task."""
    task = Graph(config, corpus, effective_batch(config.training))
    state = TrainState.create(task.model, config.training, Execution(8))
    for step in range(steps):
        rate = config.training.learning_rate * min(1.0, (step + 1) / config.training.warmup_steps)
        train_step(state, task, task.batch(step), rate)
        state.progress.step += 1
    return task


def filled(task: Graph, config: Config, corpus: GraphCorpus, leaf_ratio: float = 0.5) -> dict[str, float]:
    """Returns the evaluation metrics on the training split, with masks that training did not use."""
    changed = config.model_copy(update={"data": config.data.model_copy(update={"leaf_mask_ratio": leaf_ratio})})
    train = corpus.train
    repeated = replace(train, examples=train.examples * 5)  # each copy is masked differently
    masking = Masking(repeated, mask_rules(changed, corpus.codec.tokenizer), seed=99)
    metrics = evaluate(MaskedEvaluation(task.objective, masking, majority_of(train)), Execution(8))
    assert metrics is not None
    return metrics

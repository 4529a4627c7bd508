"""The kinds of runs that `tools.chaos` disturbs: tiny models and data that train within seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ours import overrides

NAMES = "red blue green fast slow old new warm cold loud quiet light dark round flat sweet"
WORDS = NAMES.split()
STEPS = 16
Settings = dict[str, object]
TRAINING: Settings = {
    "training.batch_size": 2, "training.gradient_accumulation_steps": 2, "training.max_steps": STEPS,
    "training.warmup_steps": 2, "training.logging_steps": 1, "training.save_steps": 3, "training.eval_steps": 4,
    "training.keep_last": 9, "training.precision": "fp32", "training.threads": 1, "training.compile": "off",
    "training.report_to": "none", "training.timeout_seconds": 20, "device": "cpu",
}  # fmt: skip
SHAPE: Settings = {
    "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 2, "model.d_ff": 48, "model.max_seq_len": 32,
    "model.dropout": 0.1, "data.vocab_size": 320, "data.validation_split": 0.1,
}  # fmt: skip
GRAPH: Settings = {
    **SHAPE, "task": "graph", "data.vocab_size": 480, "data.validation_split": 0.2, "data.leaf_mask_ratio": 0.5,
    "data.min_leaf_groups": 1,
}  # fmt: skip
MASKED: Settings = {
    **GRAPH, "model.leaves": 0, "model.decay": "none", "model.position_embedding": "learned",
    "model.embedding_norm": "true", "data.leaf_mask_ratio": 0.15, "data.min_leaf_groups": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of run: its settings and its number of processes."""

    name: str
    settings: Settings
    processes: int = 1

    def command(self, run: Path, resume: bool) -> list[str]:
        """Returns the arguments of `sansgpu` for a run."""
        chosen = overrides({**TRAINING, **self.settings})
        many = ["--processes", str(self.processes)] if self.processes > 1 else []
        return ["train", *chosen, "--output-dir", str(run), *many, *(["--resume", "latest"] if resume else [])]


GRPO = {
    "task": "grpo", "data.dataset_name": "arithmetic", "data.max_length": 96, "data.chat_template": "simple",
    "training.grpo.group_size": 2, "training.grpo.max_completion_length": 8, "training.grpo.beta": 0.1,
    "training.eval_batches": 1,
}  # fmt: skip


def make_kinds(folder: Path) -> list[Kind]:
    """Returns all kinds after writing their data and base models to `folder`."""
    from tools.tiny_model import make_folder

    text = {**SHAPE, "data.dataset_name": _write(folder / "text.jsonl", _texts())}
    graph = {"data.dataset_name": _write(folder / "graph.jsonl", _graphs())}
    facts = {"data.dataset_name": _write(folder / "facts.jsonl", _facts()), "data.inverse_relations": "true"}
    tuned = {"data.max_length": 64, "data.validation_split": 0.2, "training.learning_rate": 0.002}
    sft = {**tuned, "task": "sft", "data.dataset_name": _write(folder / "chat.jsonl", _conversations())}
    sft["model.name_or_path"] = make_folder(folder / "qwen2")
    pairs = _write(folder / "preferences.jsonl", _preferences())
    preference = {**sft, "task": "preference", "data.dataset_name": pairs}
    qa = {**tuned, "task": "qa", "data.doc_stride": 16, "data.dataset_name": _write(folder / "qa.jsonl", _questions())}
    qa["model.name_or_path"] = make_folder(folder / "bert", "bert")
    embed = {**tuned, "task": "embed", "data.dataset_name": _write(folder / "pairs.jsonl", _pairs())}
    embed["model.name_or_path"] = qa["model.name_or_path"]
    classify = {**tuned, "task": "classify", "data.dataset_name": _write(folder / "labeled.jsonl", _labeled())}
    classify["model.name_or_path"] = qa["model.name_or_path"]
    tokens = {**tuned, "task": "tokens", "data.dataset_name": _write(folder / "tagged.jsonl", _tagged())}
    tokens |= {"model.name_or_path": qa["model.name_or_path"], "data.doc_stride": 16}
    lora = {"model.adapter": "lora", "model.lora_dropout": 0.1}
    together = {**text, "model.dropout": 0}
    return [
        Kind("pretrain, Qwen3's layout", {**text, "model.activation": "swiglu", "training.optimizer": "muon"}),
        Kind("pretrain, GPT-2's layout", {**text, "model.activation": "gelu", "training.optimizer": "adamw"}),
        Kind("pretrain, Apertus' layout", {**text, "model.activation": "relu2", "data.pack_sequences": "false"}),
        Kind(
            "pretrain, samples and boards", {**text, "training.sample_tokens": 4, "training.report_to": "tensorboard"}
        ),
        Kind("masked", {**MASKED, **graph}),
        Kind("graph", {**GRAPH, **graph}),
        Kind("knowledge graph", {**GRAPH, **facts}),
        Kind("sft, whole", sft),
        Kind("sft, LoRA", {**sft, **lora}),
        Kind("preference", preference),
        Kind("preference, KTO with LoRA", {**preference, **lora, "training.preference.loss": "kto"}),
        Kind("grpo, LoRA", {**sft, **lora, **GRPO}),
        Kind("qa", qa),
        Kind("embed", embed),
        Kind("static", {**tuned, "task": "static", "data.dataset_name": embed["data.dataset_name"]}),
        Kind("classify", classify),
        Kind("tokens", tokens),
        Kind("2 processes", together, 2),
        Kind("2 processes, optimizer sharded", {**together, "training.sharding": "optimizer"}, 2),
        Kind("2 processes, all sharded", {**together, "training.sharding": "full"}, 2),
    ]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def _texts(count: int = 200) -> Iterable[dict[str, Any]]:
    draw = random.Random(0)
    for _ in range(count):
        yield {"text": _sentence(draw, draw.randint(5, 60))}


def _pairs(count: int = 60) -> Iterable[dict[str, Any]]:
    draw = random.Random(3)
    for number in range(count):
        yield {"anchor": f"{_sentence(draw, 4)} {number}", "positive": f"{number} {_sentence(draw, 9)}"}


def _labeled(count: int = 40) -> Iterable[dict[str, Any]]:
    draw = random.Random(0)
    for _ in range(count):
        text = _sentence(draw, draw.randint(3, 30))
        yield {"text": text, "label": "red" if "red" in text else "other"}


def _tagged(count: int = 40) -> Iterable[dict[str, Any]]:
    draw = random.Random(4)
    for _ in range(count):
        words = _sentence(draw, draw.randint(3, 60)).split()
        yield {"tokens": words, "tags": ["B-color" if word in WORDS[:3] else "O" for word in words]}


def _graphs(count: int = 20) -> Iterable[dict[str, Any]]:
    for number in range(count):
        head, tail, place = (WORDS[(number * k + number // 16) % 16] for k in (1, 3, 5))
        triples = [{"head": head, "relation": r, "tail": t} for r, t in (("treats", tail), ("acts on", place))]
        yield {"id": f"d{number}", "text": f"note {number} : the {head} one was {place} {number}", "triples": triples}


def _facts() -> Iterable[dict[str, Any]]:
    for number, head in enumerate(WORDS):
        for relation, tail in (("part of", WORDS[number // 3]), ("like", WORDS[-number - 1])):
            yield {"head": head, "relation": relation, "tail": tail}


def _conversations(count: int = 30) -> Iterable[dict[str, Any]]:
    draw = random.Random(1)
    for _ in range(count):
        yield {"prompt": _sentence(draw, 3), "completion": _sentence(draw, draw.randint(1, 9))}


def _preferences(count: int = 30) -> Iterable[dict[str, Any]]:
    draw = random.Random(5)
    for _ in range(count):
        chosen, rejected = (f"{name} {_sentence(draw, draw.randint(1, 9))}" for name in ("red", "blue"))
        yield {"prompt": _sentence(draw, draw.randint(2, 12)), "chosen": chosen, "rejected": rejected}


def _questions(count: int = 30) -> Iterable[dict[str, Any]]:
    draw = random.Random(2)
    for number in range(count):
        context = f"{_sentence(draw, draw.randint(5, 40))}. The fox{number} is brown. {_sentence(draw, 5)}"
        answers = {"text": ["brown"], "answer_start": [context.index("brown")]}
        yield {"id": f"q{number}", "question": f"Which colour has fox{number}?", "context": context, "answers": answers}

"""Trains tiny fine-tuning runs."""

from __future__ import annotations

from pathlib import Path

from tests.processes import Captured as Captured
from tests.processes import options, train_once
from tests.processes import sentence as sentence
from tests.tasks.folders import model_folder

TINY = {
    "data.max_length": 96, "training.batch_size": 2, "training.gradient_accumulation_steps": 2,
    "training.learning_rate": 0.002, "training.warmup_steps": 2, "training.max_steps": 4, "training.logging_steps": 1,
    "training.save_steps": 2, "training.eval_steps": 2, "training.precision": "fp32", "training.compile": "off",
    "training.report_to": "none", "training.threads": 1, "device": "cpu",
}  # fmt: skip


def settings(home: Path, task: str = "sft", **changes: object) -> list[str]:
    own = {
        "task": task,
        "model.name_or_path": model_folder("qwen2" if task == "sft" else "bert"),
        "data.dataset_name": home / {"sft": "chat.jsonl", "qa": "squad.json"}.get(task, "tags.conll"),
        **({"data.doc_stride": 16} if task in ("qa", "tokens") else {}),
    }
    return options(TINY, own, changes)


def made(home: Path, name: str, task: str = "sft", **changes: object) -> Path:
    """Trains a run in this process unless one with this name exists, and returns its folder."""
    return train_once(home / name, settings(home, task, **changes))

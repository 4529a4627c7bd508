"""Helpers of the tests that train only the last blocks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sansgpu.events.progress import ignore_progress
from sansgpu.planning.resolve import resolve_run
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from tests.processes import events_of, options, train_once
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import chat_rows, conll, labeled_rows, model_folder, preference_rows
from tests.tasks.texts import text_rows

LORA = {"model.adapter": "lora"}
EPOCHS = {"training.max_steps": "", "training.num_epochs": 3, "training.eval_steps": 0, "training.save_steps": 0}


def fill(home: Path) -> None:
    labeled_rows(home / "classify.jsonl", pairs=True)
    conll(home / "tokens.conll")
    text_rows(home / "embed.jsonl", "triplets")
    preference_rows(home / "preference.jsonl")
    chat_rows(home / "sft.jsonl")


def chosen(home: Path, task: str, architecture: str, *changes: Mapping[str, object]) -> list[str]:
    data = home / ("tokens.conll" if task == "tokens" else f"{task}.jsonl")
    own = {
        "task": task, "model.name_or_path": model_folder(architecture), "data.dataset_name": data,
        "data.validation_split": 0.2, "model.trained_layers": 1,
    }  # fmt: skip
    merged: dict[str, object] = {}
    for change in (TINY, own, *changes):
        merged |= change
    return options(merged)


def made(home: Path, name: str, *arguments: Any) -> Path:
    return train_once(home / name, chosen(home, *arguments))


def task_with_data(home: Path, *arguments: Any) -> Any:
    given = [text for text in chosen(home, *arguments) if text != "--set"]
    run = resolve_run(load_config(None, given)[0], ignore_progress, lambda message: None)
    return task_of(run.config)(run.config, run.corpus, 4)


def losses_of(run: Path) -> list[float]:
    return [event["loss"] for event in events_of(run, "step", "eval")]


def arrays_in(cache: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in cache.glob("activations/*/*.npy")}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a model by name, without the prefix of a model with a head."""
    return {name.removeprefix("bert."): value for name, value in load_file(folder / "model.safetensors").items()}

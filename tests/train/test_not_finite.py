"""A loss that is infinite or NaN ends a run with what to change, depending on where the run is."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sansgpu.cli import run as cli
from tests.processes import Captured, messages, options, train
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import chat_rows, model_folder

# Without warmup, so that the second step has diverged.
DIVERGING = {"training__learning_rate": 1e30, "training__warmup_steps": 0, "training__max_steps": 20}


def failed(capsys: Captured) -> str:
    return messages(capsys.readouterr().err)[-1]


def test_a_run_without_a_snapshot_is_to_be_started_again(home: Path, tmp_path: Path, capsys: Captured) -> None:
    none = {"training__save_steps": 0, "training__eval_steps": 0, "training__max_grad_norm": 0}
    assert train(home, tmp_path / "run", **DIVERGING, **none) == 1
    said = failed(capsys)
    assert "the learning rate is probably too high: start the run again with --set training.learning_rate=0.02" in said
    assert "(it is 1e+30) or more training.warmup_steps (now 0), and set training.max_grad_norm to 1." in said
    assert "resume" not in said


def test_a_resume_is_suggested_only_with_a_change(home: Path, tmp_path: Path, capsys: Captured) -> None:
    saved = {"training__save_steps": 1, "training__eval_steps": 0}
    for more in ((), ("--resume",)):
        assert train(home, tmp_path / "run", *more, **DIVERGING, **saved) == 1
        said = failed(capsys)
        assert "resume from step-00000" in said
        assert ", or from an earlier snapshot, with --set training.learning_rate=0.02" in said
        assert said.endswith("; without a change it would fail at the same step again.")


def test_weights_that_are_nan_are_not_blamed_on_the_learning_rate(home: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = shutil.copytree(model_folder("qwen2"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    chat_rows(home / "chat.jsonl")
    own = {"task": "sft", "model.name_or_path": folder, "data.dataset_name": home / "chat.jsonl"}
    assert cli(["train", *options(TINY, own), "--output-dir", str(tmp_path / "run")]) == 1
    assert "no weight has changed yet, so the cause is the model, the data or the precision" in failed(capsys)

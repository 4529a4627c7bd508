"""Runs of every family on the page of models resume byte for byte, and their GGUF files in q8_0 are read again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tools.family_trials import rows_of, write_rows
from tools.supported_models import FAMILIES

from sansgpu.cli import run as cli
from sansgpu.config import ModelConfig
from sansgpu.models import families
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from tests.models.formats.gguf_models import base, logits_of, write_base
from tests.processes import digests, options, record, train_once
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import model_folder

STEPS, SAVED = 4, 2
OFTEN = ("mamba2", "bert")
WITH_GGUF = [family.model_type for family in families.with_gguf()]
# Median over tokens of the relative difference of logits: q8_0 rounds weights to 1 of 127 parts of a block's largest,
# and activations are bf16, which alone change those of Gemma 4's tiny model by 3%. The median, because a token whose
# experts are chosen by nearly equal scores may get others.
Q8_DIFFERENCE = 0.08


def fill(home: Path) -> None:
    for task in ("sft", "embed"):
        write_rows(home / f"{task}.jsonl", rows_of(task))


def seldom_long(names: list[str]) -> list[object]:
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("architecture", seldom_long([family.model_type for family in FAMILIES]))
def test_a_resumed_adapter_equals_an_uninterrupted_one(home: Path, tmp_path: Path, architecture: str) -> None:
    is_encoder = families.get(architecture).is_encoder
    own = {
        "task": "embed" if is_encoder else "sft", "model.name_or_path": model_folder(architecture),
        "data.dataset_name": home / ("embed.jsonl" if is_encoder else "sft.jsonl"), "model.adapter": "lora",
        "model.lora_dropout": 0.1, "training.max_steps": STEPS, "training.save_steps": SAVED,
        "training.eval_steps": STEPS, "training.gradient_accumulation_steps": 1,
    }  # fmt: skip
    arguments = options(TINY, own)
    straight, resumed = train_once(tmp_path / "straight", arguments), tmp_path / "resumed"
    shutil.copytree(straight, resumed)
    for later in (resumed / "final", resumed / f"snapshots/step-{STEPS:06d}"):
        shutil.rmtree(later)
    assert cli(["train", *arguments, "--output-dir", str(resumed), "--resume"]) == 0
    assert digests(resumed) == digests(straight)
    assert record(resumed) == record(straight)
    assert len(digests(straight)) >= 3


@pytest.mark.parametrize("architecture", seldom_long(WITH_GGUF))
def test_files_in_q8_0_have_nearly_the_logits_of_the_model(tmp_path: Path, architecture: str) -> None:
    model, tokenizer = base(tmp_path / "base", architecture)
    write_base(tmp_path / "model.gguf", model, tokenizer, "q8_0")
    read = load_pretrained(ModelConfig(name_or_path=str(tmp_path / "model.gguf")), Head("causal"), 0, frozen=True)
    ids = [number * 23 % 1000 for number in range(60)]
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_of(read.eval(), ids).float()
    expected = logits_of(model, ids)
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).median() < Q8_DIFFERENCE

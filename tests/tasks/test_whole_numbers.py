"""Models whose config.json writes whole numbers where floats belong, as published ALBERTs do, are trained."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from tools.tiny_model import TINY_CONTEXT, VOCABULARY
from transformers import AlbertConfig, AlbertModel

from tests.processes import events_of, finish
from tests.tasks.fine_tuned import settings
from tests.tasks.folders import chat_rows, model_folder, squad

BERT = {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
WHOLE_NUMBERS = {
    "albert": {**BERT, "classifier_dropout_prob": 0},
    "bert": BERT,
    "llama": {"attention_dropout": 0},
    "gpt2": {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
}


def written(folder: Path, architecture: str) -> Path:
    """Copies a small model of an architecture, with whole numbers in its config.json."""
    shutil.copytree(model_folder("bert" if architecture == "albert" else architecture), folder)
    if architecture == "albert":
        sizes = {"embedding_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        AlbertModel(
            AlbertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=TINY_CONTEXT, **sizes)
        ).save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **WHOLE_NUMBERS[architecture]}
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=() if a == "bert" else pytest.mark.long) for a in WHOLE_NUMBERS]
)
def test_a_model_with_whole_numbers_for_floats_is_trained(tmp_path: Path, architecture: str) -> None:
    task = "qa" if architecture in ("bert", "albert") else "sft"
    chat_rows(tmp_path / "chat.jsonl")
    squad(tmp_path / "squad.json")
    model, run = written(tmp_path / "model", architecture), tmp_path / "run"
    changes = {"model__name_or_path": model, "training__max_steps": 2}
    code, _, error = finish(
        ["train", *settings(tmp_path, task, **changes), "--output-dir", str(run)], tmp_path / "cache"
    )
    assert code == 0, error
    losses = [event["loss"] for event in events_of(run, "step")]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))

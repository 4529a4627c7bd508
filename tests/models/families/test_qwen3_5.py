"""Folders of Qwen3.5 also contain a vision model, without which their language model is trained."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from benchmarks.ours import overrides
from tools.family_trials import TRAINING, rows_of, sansgpu, write_rows

from tests.tasks.folders import model_folder

VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
    "num_position_embeddings": 16,
}  # fmt: skip


def test_a_folder_with_a_vision_model_trains_its_language_model_and_says_so(tmp_path: Path) -> None:
    text = model_folder("qwen3_5_text")
    settings = json.loads((text / "config.json").read_text())
    config = transformers.AutoConfig.for_model("qwen3_5", text_config=settings, vision_config=VISION)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(text).save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", rows_of("sft", 4))
    settings = {
        **TRAINING, "task": "sft", "model.name_or_path": tmp_path / "model", "training.max_steps": 1,
        "data.dataset_name": tmp_path / "rows.jsonl", "data.max_length": 64, "model.adapter": "lora",
        "data.chat_template": "simple",
    }  # fmt: skip
    outcome = sansgpu("train", *overrides(settings), "--output-dir", tmp_path / "run")
    assert outcome.refusal is None
    assert "also reads images or sound; only its language model is loaded, trained and saved" in outcome.out
    saved = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert saved["model_type"] == "qwen3_5_text"

"""Of a multimodal model, the language model learns and is exported; the other parts stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tools.family_trials import TRAINING, rows_of, sansgpu, write_rows
from tools.tiny_model import make_tokenizer

from sansgpu.config import ModelConfig
from sansgpu.models.family import TINY_HEAD_DIM
from sansgpu.models.formats.gguf_source import open_gguf
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from tests.processes import options

PROCESSOR = "processor_config.json"
TEXT = {**TINY_HEAD_DIM, "vocab_size": 1024, "query_pre_attn_scalar": 16, "sliding_window": 32}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Gemma 3 that reads images."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("multimodal") / "model"
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    make_tokenizer(encoder=False).save_pretrained(folder)
    (folder / PROCESSOR).write_text("{}")
    return folder


@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.long), "lora"])
def test_only_the_language_model_learns(model: Path, tmp_path: Path, adapter: str) -> None:
    write_rows(tmp_path / "rows.jsonl", rows_of("sft", 8))
    chosen = {
        **TRAINING, "task": "sft", "model.name_or_path": model, "model.adapter": adapter, "training.max_steps": 1,
        "data.dataset_name": tmp_path / "rows.jsonl", "data.max_length": 64, "training.learning_rate": 0.01,
        **({"model.merge_adapter": False} if adapter == "lora" else {}),
    }  # fmt: skip
    outcome = sansgpu("train", *options(chosen), "--output-dir", tmp_path / "run")
    assert outcome.refusal is None
    assert "only its language model learns; vision_tower and multi_modal_projector stay as they are" in outcome.out
    if adapter == "lora":
        names = load_file(tmp_path / "run/final/adapter_model.safetensors")
        assert names
        assert not [name for name in names if "language_model" not in name]
        return
    assert (tmp_path / "run/final" / PROCESSOR).read_text() == "{}"
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run/final"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not [name for name in changed if "language_model" not in name]


@torch.no_grad()
def test_a_gguf_file_has_the_language_model(model: Path, tmp_path: Path) -> None:
    outcome = sansgpu("export", model, "--format", "gguf", "--type", "f32", "--output", tmp_path / "model.gguf")
    assert "the file has only the language model" in outcome.err
    assert open_gguf(tmp_path / "model.gguf").settings["model_type"] == "gemma3_text"
    text = load_pretrained(ModelConfig(name_or_path=str(tmp_path / "model.gguf")), Head("causal"), 0).eval()
    whole = transformers.Gemma3ForConditionalGeneration.from_pretrained(model).eval()
    ids = torch.arange(40)[None] * 7
    torch.testing.assert_close(text(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)

"""Adapters of others on tied embeddings, and with biases, compute what peft computes and are exported as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sansgpu.cli import run as cli
from sansgpu.config import ModelConfig
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.train.loading import ModelRequest, open_model
from tests.tasks.adapters.peft_adapters import UNTRAINED, logits, peft_logits, written_by_peft
from tests.tasks.fine_tuned import Captured, made, sentence, settings
from tests.tasks.folders import chat_rows

pytestmark = [
    pytest.mark.usefixtures("home"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),  # peft warns about such adapters
]

EMBEDDING, HEAD = "embed_tokens", "lm_head"
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora_on_embedding": {"target_modules": ["q_proj", EMBEDDING]},
    "lora_on_head": {"target_modules": ["q_proj", HEAD]},
    "lora_on_both": {"target_modules": ["q_proj", EMBEDDING, HEAD]},
    "saved_embedding": {"modules_to_save": [EMBEDDING]},
    "saved_head": {"modules_to_save": [HEAD]},
    "saved_both": {"modules_to_save": [EMBEDDING, HEAD]},
    "dora_on_embedding": {"target_modules": ["q_proj", EMBEDDING], "use_dora": True},
    "tied_lora": {"target_modules": ["q_proj", EMBEDDING], "ensure_weight_tying": True},
    "tokens_of_head": {"trainable_token_indices": {HEAD: [5, 6, 23, 46]}},
    "tokens_of_both": {"trainable_token_indices": [5, 6, 23, 46]},
}
OFTEN = ("lora_on_embedding", "tied_lora")
UNMERGED = {"model__merge_adapter": "false"}


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")


def assert_close(model: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def opened(target: Path, verb: Any = "chat") -> Any:
    return open_model(ModelRequest(str(target)), verb, pytest.fail).objective.model


def exported(target: Path, kind: str, output: Path) -> Path:
    more = ["--type", "f32"] if kind == "gguf" else []
    assert cli(["export", str(target), "--format", kind, "--output", str(output), *more]) == 0
    return output


def in_file(path: Path) -> Any:
    return load_pretrained(ModelConfig(name_or_path=str(path)), Head("causal"), 0)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in ADAPTERS]
)
def test_an_adapter_on_tied_weights_computes_what_peft_computes(tmp_path: Path, name: str) -> None:
    folder = written_by_peft(tmp_path / "adapter", **ADAPTERS[name])
    expected = peft_logits(folder)
    assert_close(opened(folder), expected)
    merged = exported(folder, "hf", tmp_path / "hf")
    assert_close(AutoModelForCausalLM.from_pretrained(merged), expected)
    is_tied = name in ("tied_lora", "tokens_of_both")
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] == is_tied
    assert_close(in_file(exported(folder, "gguf", tmp_path / "model.gguf")), expected)
    assert_close(in_file(exported(merged, "gguf", tmp_path / "again.gguf")), expected)


def refusal(home: Path, folder: Path, capsys: Captured, **changes: object) -> str:
    capsys.readouterr()
    chosen = settings(home, model__name_or_path=folder, **changes)
    assert cli(["train", *chosen, "--output-dir", str(home / "refused"), "--dry-run"]) == 2
    return sentence(capsys)


def test_training_continues_from_a_merged_adapter(home: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = written_by_peft(tmp_path / "adapter", **ADAPTERS["lora_on_embedding"])
    expected = peft_logits(folder)
    for kind in ("lora", "none"):
        run = made(home, f"tied-{kind}", model__name_or_path=folder, model__adapter=kind, **UNTRAINED)
        assert_close(AutoModelForCausalLM.from_pretrained(run / "final"), expected)
        assert not json.loads((run / "final/config.json").read_text())["tie_word_embeddings"]
    assert_close(in_file(exported(home / "tied-lora", "gguf", tmp_path / "run.gguf")), expected)
    said = refusal(home, folder, capsys, model__adapter="continue")
    assert "shares its weight with another layer, and sansgpu cannot train that; set model.adapter to lora" in said
    plain = written_by_peft(tmp_path / "plain")  # without a tokenizer, so its base model's is used
    (tmp_path / "text.txt").write_text("a red house " * 50)
    assert cli(["eval", str(plain), "--data", str(tmp_path / "text.txt")]) == 0
    said = refusal(home, plain, capsys, model__adapter="lora", **UNMERGED)
    assert "with the adapter in" in said
    assert "merged in; merge it, too (model.merge_adapter=true), or set model.adapter to continue" in said
    unmerged = ["--format", "hf", "--no-merge", "--output", str(tmp_path / "alone")]
    assert cli(["export", str(home / "tied-lora"), *unmerged]) == 2
    assert "the new adapter cannot be saved alone" in sentence(capsys)


def test_biases_of_adapters_are_used_and_never_lost(home: Path, tmp_path: Path, capsys: Captured) -> None:
    with_bias = written_by_peft(tmp_path / "q", lora_bias=True)  # on layers of Qwen2 that have a bias
    expected = peft_logits(with_bias)
    run = made(home, "biased", model__name_or_path=with_bias, model__adapter="continue", **UNTRAINED, **UNMERGED)
    assert_close(opened(run, "evaluate"), expected)
    assert_close(in_file(exported(run, "gguf", tmp_path / "run.gguf")), expected)
    assert_close(AutoModelForCausalLM.from_pretrained(exported(with_bias, "hf", tmp_path / "hf")), expected)
    without = written_by_peft(tmp_path / "o", target_modules=["o_proj"], lora_bias=True)
    assert_close(opened(without), peft_logits(without))
    for kind in ("hf", "gguf"):
        capsys.readouterr()
        assert cli(["export", str(without), "--format", kind, "--output", str(tmp_path / f"{kind}.o")]) == 2
        said = sentence(capsys)
        assert "merging its adapter (lora_bias) adds model.layers.0.self_attn.o_proj.bias" in said
    assert "merging its adapter (lora_bias) adds" in refusal(home, without, capsys, model__adapter="lora")
    said = refusal(home, without, capsys, model__adapter="continue")
    assert "has a bias (lora_bias) for model.layers.0.self_attn.o_proj, which has none" in said
    assert "set model.merge_adapter=false" in said

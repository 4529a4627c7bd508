"""Adapters are exported as GGUF files; llama.cpp then computes the logits of the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from sansgpu.cli import run as cli
from sansgpu.models.formats.gguf_reader import read_gguf
from tests.models.formats.gguf_models import logits_of
from tests.models.llama import LlamaFile
from tests.processes import Captured, messages, options, train_once
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import chat_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")

OPTIONS = [
    {"target_modules": "all-linear"},
    {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"q_proj": 2, "c_attn": 2}},
    {"target_modules": "all-linear", "alpha_pattern": {"layers.0.self_attn.k_proj": 20, "c_proj": 20}},
]


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")


def adapter(folder: Path, architecture: str, **changes: Any) -> Any:
    """Writes a random adapter with peft; returns the model with the adapter merged in."""
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_pretrained(model_folder(architecture))
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **changes)
    adapted: Any = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


def export(capsys: Captured, *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = cli(["export", *map(str, arguments), "--format", "gguf"])
    return code, "\n".join(messages(capsys.readouterr().err))


@pytest.mark.parametrize("changes", OPTIONS, ids=["plain", "rslora", "alphas"])
@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(a, marks=pytest.mark.long) for a in ("llama", "qwen2", "falcon"))]
)
def test_the_matrices_are_those_of_peft(
    architecture: str, changes: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    """The base's matrices in its GGUF file, plus the products of the adapter's, are the merged model's matrices."""
    merged = adapter(tmp_path / "adapter", architecture, **changes)
    for folder in ("base", "merged"):
        target = tmp_path / "merged" if folder == "merged" else model_folder(architecture)
        if folder == "merged":
            merged.save_pretrained(target)
            _copy_tokenizer(model_folder(architecture), target)
        assert export(capsys, target, "--type", "f32", "--output", tmp_path / f"{folder}.gguf")[0] == 0
    code, error = export(capsys, tmp_path / "adapter", "--no-merge", "--type", "f32", "--output", tmp_path / "a.gguf")
    assert code == 0, error
    metadata, tensors = read_gguf(tmp_path / "a.gguf")
    assert (metadata["general.type"], metadata["adapter.type"]) == ("adapter", "lora")
    base, wanted = (read_gguf(tmp_path / f"{name}.gguf")[1] for name in ("base", "merged"))
    adapted = {name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")}
    assert len(tensors) == 2 * len(adapted)
    for name in base:
        found = np.array(base[name].data, dtype=np.float64)
        if name in adapted:
            first, second = (np.array(tensors[f"{name}.{part}"].data, np.float64) for part in ("lora_a", "lora_b"))
            found += metadata["adapter.lora.alpha"] / len(first) * second @ first
        np.testing.assert_allclose(found, wanted[name].data, rtol=1e-4, atol=1e-5)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for file in source.glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("changes", OPTIONS, ids=["plain", "rslora", "alphas"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2"])
def test_llama_cpp_computes_the_logits_of_the_merged_model(
    architecture: str, changes: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip("xllamacpp")
    merged, ids = adapter(tmp_path / "adapter", architecture, **changes), [number * 23 % 1000 for number in range(60)]
    base, file = tmp_path / "base.gguf", tmp_path / "adapter.gguf"
    assert export(capsys, model_folder(architecture), "--type", "f32", "--output", base)[0] == 0
    assert export(capsys, tmp_path / "adapter", "--no-merge", "--type", "f32", "--output", file)[0] == 0
    wanted = logits_of(merged, ids)
    allowed = 1e-4 + (3e-3 if architecture == "gpt2" else 0)  # llama.cpp reads GELU from an f16 table
    assert LlamaFile(base, file).largest_error(wanted, ids) < allowed
    assert LlamaFile(base).largest_error(wanted, ids) > 0.1


def test_a_run_is_exported_as_an_adapter_file(home: Path, capsys: Captured) -> None:
    own = {"task": "sft", "model.name_or_path": model_folder("llama"), "data.dataset_name": home / "chat.jsonl"}
    run = train_once(home / "run", options(TINY, own, {"model.adapter": "lora"}))
    assert export(capsys, run, "--no-merge")[0] == 0
    metadata, tensors = read_gguf(run / "run-lora-f16.gguf")
    assert metadata["general.base_model.0.name"] == model_folder("llama").name
    assert {tensor.tensor_type for tensor in tensors.values()} == {gguf.GGMLQuantizationType.F16}
    assert "an adapter's must be f32, f16, bf16" in export(capsys, run, "--no-merge", "--type", "q4_k")[1]
    whole = train_once(home / "whole", options(TINY, own, {"training.max_steps": 1}))
    for choice in ("--merge", "--no-merge"):
        assert "has no adapter" in export(capsys, whole, choice)[1]
    code, error = export(capsys, whole / "final", "--no-merge", "--output", home / "a.gguf")
    assert code == 2
    assert "final has no adapter; remove --no-merge" in error


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "cannot contain model.layers.0.self_attn.q_proj."),
        (
            "llama",
            {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
            "cannot contain model.layers.0.input_layernorm.weight",
        ),
        ("doge", {"target_modules": ["o_proj"]}, "this model has the architecture doge"),
        ("youtu", {"target_modules": ["kv_b_proj"]}, "cannot contain model.layers.0.self_attn.kv_b_proj."),
    ],
)
def test_what_llama_cpp_would_not_compute_is_refused(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path, capsys: Captured
) -> None:
    adapter(tmp_path / "adapter", architecture, **changes)
    code, error = export(capsys, tmp_path / "adapter", "--no-merge", "--output", tmp_path / "a.gguf")
    assert code == 2
    assert message in error
    assert not (tmp_path / "a.gguf").exists()

"""Adapters on a frozen base whose weights stay quantized."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.tiny_model import make_folder

from sansgpu.cli import run as cli
from sansgpu.config import ModelConfig
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.models.huggingface.probes import block_weights
from sansgpu.models.quantized_layers import QuantizedEmbedding, QuantizedLayer, QuantizedLinear
from tests.models.llama import LlamaFile
from tests.processes import digests, events_of, finish, json_of, kill_when, start
from tests.tasks.fine_tuned import Captured, made, sentence, settings
from tests.tasks.folders import chat_rows, labeled_rows, model_folder

CAUSAL = Head("causal")


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")
    labeled_rows(home / "rows.jsonl")


def loaded(base: Path, precision: str = "auto") -> Any:
    return load_pretrained(
        ModelConfig(name_or_path=str(base), adapter="lora", base_precision=precision), CAUSAL, 0
    ).eval()


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLayer]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def dequantized(base: Path, precision: str, folder: Path) -> Path:
    """Writes a folder with the weights of the quantized base, dequantized to fp32."""
    model, weights = loaded(base, precision), load_file(base / "model.safetensors")
    weights |= {name: value.detach().float() for name, value in model.named_parameters()}
    for name, layer in quantized_layers(model).items():
        if f"{name}.weight" in weights:  # a tied head has no weight of its own
            transposed = getattr(layer, "transposed", False)
            weights[f"{name}.weight"] = (layer.dequantize().T if transposed else layer.dequantize()).contiguous()
    copytree(base, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in [*events_of(run, "step"), *events_of(run, "eval")]]


def evaluated(capsys: Captured, run: Path, home: Path, *options: str) -> float:
    return float(json_of(capsys, "eval", run, "--data", home / "chat.jsonl", *options)["loss"])


@pytest.mark.parametrize(
    ("architecture", "adapter", "precision"),
    [
        ("qwen2", "lora", "int8"),
        ("gemma3_text", "lora", "int8"),  # scales its embedding, which is also its head
        pytest.param("llama", "dora", "int4", marks=pytest.mark.long),
        pytest.param("gpt2", "lora", "int4", marks=pytest.mark.long),
    ],
)
def test_training_equals_that_on_the_dequantized_weights(
    home: Path, tmp_path: Path, capsys: Captured, architecture: str, adapter: str, precision: str
) -> None:
    base = model_folder(architecture)
    wide = dequantized(base, precision, tmp_path / "wide")
    assert isinstance(loaded(base, precision).get_input_embeddings(), QuantizedEmbedding)
    chosen = {"model__adapter": adapter, "model__gradient_checkpointing": "true", "model__lora_dropout": 0.1}
    chosen = chosen if architecture == "qwen2" else {"model__adapter": adapter}
    run = made(home, f"{architecture}-run", model__name_or_path=base, model__base_precision=precision, **chosen)
    expected = made(tmp_path, "expected", model__name_or_path=wide, data__dataset_name=home / "chat.jsonl", **chosen)
    assert losses(run) == pytest.approx(losses(expected), rel=2e-5)
    assert losses(run)[-1] < losses(run)[0]
    assert (run / "final/adapter_config.json").exists()
    assert not (run / "final/model.safetensors").exists()
    assert cli(["export", str(run), "--merge", "--output", str(tmp_path / "merged")]) == 0
    ours, theirs = load_file(tmp_path / "merged/model.safetensors"), load_file(expected / "final/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
    assert evaluated(capsys, run, home) == pytest.approx(evaluated(capsys, expected, home), rel=1e-5)


@pytest.mark.parametrize(
    "architecture", ["lfm2_moe", *(pytest.param(name, marks=pytest.mark.long) for name in ("dots1", "mixtral"))]
)
def test_experts_that_files_hold_one_by_one_are_merged(architecture: str) -> None:
    """transformers merges them to one tensor, which stays in bf16, as it is not the matrix of a linear layer."""
    folder = model_folder(architecture)
    assert any(".experts.0." in name for name in load_file(folder / "model.safetensors"))
    expected, found = load_pretrained(ModelConfig(name_or_path=str(folder)), CAUSAL, 0).eval(), loaded(folder, "int8")
    assert quantized_layers(found)
    weights = dict(found.named_parameters())
    experts = {name: value for name, value in expected.named_parameters() if ".experts." in name and value.ndim == 3}
    assert experts
    for name, value in experts.items():
        assert torch.equal(weights[name], value.bfloat16()), name
    tokens = torch.arange(40)[None] * 7
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        difference = found(tokens).logits.float() - expected.bfloat16()(tokens).logits.float()
    assert difference.norm() < 0.03 * expected(tokens).logits.norm()


@pytest.mark.long
def test_an_adapter_alone_is_used_with_the_base_that_it_names(home: Path, tmp_path: Path, capsys: Captured) -> None:
    base = copytree(model_folder("qwen2"), tmp_path / "base")
    chosen = {"data__dataset_name": home / "chat.jsonl", "model__name_or_path": base, "model__base_precision": "int4"}
    run, rows = made(tmp_path, "run", model__adapter="lora", data__max_length=128, **chosen), home / "chat.jsonl"
    final, settings_file = run / "final", run / "final/adapter_config.json"
    expected = evaluated(capsys, run, home)
    merged, file = tmp_path / "merged", tmp_path / "merged.gguf"
    assert cli(["export", str(final), "--output", str(merged)]) == 0
    assert cli(["export", str(final), "--format", "gguf", "--type", "f32", "--output", str(file)]) == 0
    for target in (final, merged, file):
        assert evaluated(capsys, target, home, "--window", "128") == pytest.approx(expected, rel=1e-5)
    texts = []
    for target in (run, final):
        assert cli(["generate", str(target), "--prompt", "red", "--max-new-tokens", "8", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
        assert cli(["chat", str(target), "--prompt", "red", "--max-new-tokens", "2"]) == 0
        capsys.readouterr()
    assert texts[0] == texts[1]
    on_top = made(tmp_path, "on-top", data__dataset_name=rows, model__name_or_path=final, model__adapter="lora")
    assert events_of(on_top, "eval")[0]["loss"] < events_of(run, "eval")[0]["loss"], "the trained adapter is not used"
    for arguments, said in [
        (["export", str(final)], "is not a run; set --output"),
        (
            ["export", str(final), "--output", str(final)],
            "is the folder of the adapter to export; choose another --output",
        ),
        (["export", str(final), "--no-merge", "--output", str(tmp_path / "x")], "already contains only an adapter"),
        (["embed", str(final), "--data", str(rows), "--output", "v.npy"], 'an adapter for "Qwen2ForCausalLM"'),
    ]:
        capsys.readouterr()
        assert cli(arguments) == 2
        assert said in sentence(capsys)
    known = json.loads(settings_file.read_text())
    for changes, said in [
        ({"base_model_name_or_path": str(base / "gone")}, "gone does not exist; set base_model_name_or_path in"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is null"),
        ({"base_model_name_or_path": str(final)}, "is also an adapter"),
        ({"auto_mapping": ["int4"], "r": 3}, "does not match its base model"),
    ]:
        settings_file.write_text(json.dumps({**known, **changes}))
        assert cli(["chat", str(final), "--prompt", "red"]) == 2
        assert said in sentence(capsys)


def test_a_mixture_of_experts_learns_on_a_quantized_base(home: Path, tmp_path: Path) -> None:
    base = {"model__name_or_path": model_folder("mixtral"), "model__base_precision": "int4"}
    run = made(home, "mixtral", model__adapter="lora", training__max_steps=2, training__eval_steps=1, **base)
    first, last = (event["loss"] for event in events_of(run, "eval"))
    assert last < first


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_head_whose_weight_the_models_code_reads_is_not_quantized(
    home: Path, tmp_path: Path, precision: str, capsys: Captured
) -> None:
    base = {"model__name_or_path": model_folder("mamba"), "model__adapter": "lora", "model__base_precision": precision}
    assert cli(["train", *settings(home, **base), "--max-steps", "1", "--output-dir", str(tmp_path / "run")]) == 0


@pytest.mark.long
def test_a_killed_run_resumes_byte_for_byte(home: Path, tmp_path: Path) -> None:
    chosen = {"model__adapter": "lora", "model__base_precision": "int4", "training__gradient_accumulation_steps": 8}
    first, killed = (["train", *settings(home, **chosen), "--output-dir", str(tmp_path / name)] for name in "ab")
    code, _, error = finish(first, home / "cache")
    assert code == 0, error
    assert kill_when(start(killed, home / "cache"), (tmp_path / "b/snapshots/step-000002/MANIFEST.json").exists) == -9
    code, _, error = finish([*killed, "--resume"], home / "cache")
    assert code == 0, error
    kept = [{k: v for k, v in digests(tmp_path / n).items() if "step-000004" in k or "final" in k} for n in "ab"]
    assert kept[0] == kept[1]
    assert len(kept[0]) >= 2
    stored = load_file(tmp_path / "a/snapshots/step-000004/model.safetensors")
    assert all("lora_" in name for name in stored)


@pytest.fixture(scope="module")
def wide_run(home: Path) -> Path:
    """Trains LoRA on a model whose row lengths are multiples of 256, which q4_k and q6_k require."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    base = make_folder(home / "wide-base", "llama", **sizes)
    return made(home, "wide", model__name_or_path=base, model__adapter="lora", training__max_steps=2)


@pytest.mark.parametrize("kind", ["q4_k", *(pytest.param(k, marks=pytest.mark.long) for k in ("q4_1", "q8_0"))])
def test_a_quantized_file_is_read_by_llama_cpp_and_trained_on(
    home: Path, wide_run: Path, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "model.gguf"
    asked = ["--format", "gguf", "--quantization", kind, "--output", str(file)]
    assert cli(["export", str(wide_run), *asked]) == 0
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert types["blk.0.attn_q.weight"] == kind.upper()
    assert types["output.weight"] == ("Q8_0" if kind == "q8_0" else "Q6_K")
    assert types["blk.0.attn_norm.weight"] == "F32"
    ids = [number * 23 % 1000 for number in range(64)]
    whole = load_pretrained(ModelConfig(name_or_path=str(file)), CAUSAL, 0).eval()
    with torch.no_grad():
        ours = whole(torch.tensor([ids])).logits[0]
    if find_spec("xllamacpp"):
        assert LlamaFile(file).largest_error(ours, ids) < 0.05 * ours.abs().max()
    model = loaded(file)
    layers = quantized_layers(model)
    assert len(layers) == 14 + 2
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    assert [type(table) for table in tables] == [QuantizedEmbedding, QuantizedLinear]
    assert {layer.blocks.format.name for layer in layers.values() if layer not in tables} == {kind}
    plain = dict(whole.named_parameters())
    assert all(torch.equal(layer.dequantize(), plain[f"{name}.weight"]) for name, layer in layers.items())
    run = made(
        tmp_path, "again", model__name_or_path=file, model__adapter="lora", data__dataset_name=home / "chat.jsonl"
    )
    assert (run / "final/adapter_config.json").exists()
    assert losses(run)[-1] < losses(run)[0]
    merged = tmp_path / "merged.gguf"
    assert cli(["export", str(run), "--format", "gguf", "--type", "f32", "--output", str(merged)]) == 0
    before, after = (gguf.GGUFReader(path).fields for path in (file, merged))
    names = [name for name in before if name.startswith("tokenizer.")]
    assert len(names) > 8
    assert all(before[name].contents() == after[name].contents() for name in names)
    assert [name for name in after if name.startswith("tokenizer.") and name not in before] == []


def test_probes_count_quantized_weights() -> None:
    base = model_folder("qwen2")
    assert block_weights(loaded(base, "int8")) == block_weights(loaded(base, "bf16")) > 0


def test_other_tasks_and_settings(home: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = {"data__dataset_name": home / "rows.jsonl", "data__text_column": "text", "data__label_column": "label"}
    adapted = {"model__adapter": "lora", "model__base_precision": "int8"}
    run = made(
        home,
        "classes",
        "classify",
        model__name_or_path=model_folder("bert"),
        data__validation_split=0.2,
        **rows,
        **adapted,
    )
    assert cli(["predict", str(run), "--text", "red fox", "--json"]) == 0
    for changes, expected in [
        ({"model__base_precision": "int8"}, "base_precision has no effect with adapter none"),
        (
            {**adapted, "model__lora_targets": "[q_proj,embed_tokens]"},
            "model.embed_tokens shares its weight with another",
        ),
        ({**adapted, "training__few_shot": "true"}, "set model.base_precision to auto or bf16"),
    ]:
        task = "classify" if "training__few_shot" in changes else "sft"
        capsys.readouterr()
        assert cli(["train", *settings(home, task, **changes), "--output-dir", str(tmp_path / "no")]) == 2
        assert expected in sentence(capsys)
    pickled = tmp_path / "pickled"
    copytree(model_folder("qwen2"), pickled, ignore=ignore_patterns("*.safetensors"))
    torch.save(load_file(model_folder("qwen2") / "model.safetensors"), pickled / "pytorch_model.bin")
    capsys.readouterr()
    chosen = settings(home, model__name_or_path=pickled, **adapted)
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "no")]) == 2
    assert "has no model.safetensors" in sentence(capsys)


@pytest.mark.long
def test_a_plan_knows_what_is_quantized(home: Path, wide_run: Path, capsys: Captured) -> None:
    plans = {}
    for precision in ("bf16", "int8", "int4"):
        chosen = {"model__adapter": "lora", "model__base_precision": precision, "training__precision": "bf16"}
        capsys.readouterr()
        assert cli(["plan", *settings(home, model__name_or_path=home / "wide-base", **chosen), "--json"]) == 0
        plans[precision] = json.loads(capsys.readouterr().out)
    assert [plan["base_precision"] for plan in plans.values()] == ["bf16", "int8", "int4"]
    numbers = 2 * (256 * 64 * (4 + 2 + 2 + 4) + 3 * 256 * 512)  # in the linear layers of two blocks
    tables = 2 * 1024 * 256
    weights = {precision: plan["memory_bytes"]["weights"] for precision, plan in plans.items()}
    assert weights["bf16"] - weights["int8"] == (numbers + tables) * (2 - 34 / 32)
    assert weights["bf16"] - weights["int4"] == numbers * (2 - 144 / 256) + tables * (2 - 210 / 256)


def test_what_can_be_trained_in_a_memory(home: Path, wide_run: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert cli(["plan", "--memory", "8GB", str(home / "wide-base"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["memory_bytes"] == 8 * 10**9
    needed = {option["base_precision"]: option["needed_bytes"] for option in result["options"]}
    assert needed[None] > needed["bf16"] > needed["int8"] > needed["int4"]
    assert all(option["fits"] for option in result["options"])
    assert cli(["plan", "--memory", "8GB", "--context", "100", str(home / "wide-base"), "--json"]) == 0
    assert {option["context"] for option in json.loads(capsys.readouterr().out)["options"]} == {100}
    assert cli(["plan", "--memory", "8GB", "--context", "100000", str(home / "wide-base")]) == 2
    assert "tokens; lower it" in sentence(capsys)
    assert cli(["plan", "--memory", "100MB", str(home / "wide-base")]) == 0
    assert "does not fit" in capsys.readouterr().out
    for memory in ("8XB", "0GB", ""):
        assert cli(["plan", "--memory", memory, str(home / "wide-base")]) == 2
        assert "write a size such as 8GB" in sentence(capsys)

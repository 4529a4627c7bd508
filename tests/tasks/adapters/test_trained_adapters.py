"""Adapters of peft and of sansgpu are trained further, used by every command, and exported as folders of peft."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sansgpu.cli import run as cli
from sansgpu.train.loading import ModelRequest, open_model
from tests.hub_server import Hub, serving
from tests.processes import (
    digests,
    events_of,
    finish,
    finish_apart,
    kill_when,
    options,
    record,
    start,
    train_once,
    write_rows,
)
from tests.tasks.adapters.peft_adapters import UNTRAINED, logits, peft_logits, written_by_peft
from tests.tasks.fine_tuned import TINY, Captured, made, sentence, settings
from tests.tasks.folders import chat_rows, labeled_rows, model_folder, preference_rows

pytestmark = pytest.mark.usefixtures("home")

# Options of LoRA for which sansgpu has no keys.
UNUSUAL = {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "lora_dropout": 0.1}


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")
    labeled_rows(home / "labels.jsonl")
    preference_rows(home / "pairs.jsonl")


def continued(home: Path, name: str, adapter: Path, task: str = "sft", **changes: object) -> Path:
    return made(home, name, task, model__name_or_path=adapter, model__adapter="continue", **changes)


def our_logits(target: Path) -> torch.Tensor:
    verb = "evaluate" if (target / "config.yaml").is_file() else "chat"
    return logits(open_model(ModelRequest(str(target)), verb, pytest.fail).objective.model)


@pytest.mark.parametrize(
    "changes",
    [UNUSUAL, *(pytest.param(c, marks=pytest.mark.long) for c in ({}, {"use_dora": True}))],
    ids=["unusual", "plain", "dora"],
)
def test_an_adapter_of_peft_is_trained_further_with_its_own_options(
    home: Path, tmp_path: Path, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name, adapter = request.node.callspec.id, written_by_peft(tmp_path / "adapter", **changes)
    unchanged = continued(home, f"{name}-unchanged", adapter, model__merge_adapter="false", **UNTRAINED)
    torch.testing.assert_close(our_logits(unchanged), peft_logits(adapter), rtol=1e-4, atol=1e-4)
    run = continued(home, f"{name}-trained", adapter, model__merge_adapter="false")
    losses = [event["loss"] for event in events_of(run, "eval")]
    assert losses[-1] < losses[0]
    torch.testing.assert_close(peft_logits(run / "final"), our_logits(run), rtol=1e-4, atol=1e-4)
    before, after = (json.loads((folder / "adapter_config.json").read_text()) for folder in (adapter, run / "final"))
    kept = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_dropout")
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert after["base_model_name_or_path"] == str(model_folder("qwen2"))
    assert after["target_modules"] == ["q_proj", "v_proj"]


def test_a_run_continues_from_the_adapter_of_another_and_from_its_own_snapshots(home: Path, tmp_path: Path) -> None:
    first = made(home, "first", model__adapter="lora", model__lora_rank=4, model__merge_adapter="false")
    changes = {"model__name_or_path": first / "final", "model__adapter": "continue", "training__max_steps": 10}
    arguments = [*settings(home, **changes), "--set", "training.gradient_accumulation_steps=8"]
    for name in ("whole", "killed"):
        command = ["train", *arguments, "--output-dir", str(home / name)]
        if name == "killed":
            process = start(command, home / "cache")
            assert kill_when(process, (home / name / "snapshots/step-000004/MANIFEST.json").exists) == -9
            command.append("--resume")
        code, _, error = finish(command, home / "cache")
        assert code == 0, error
    whole, killed = home / "whole", home / "killed"
    last = [{k: v for k, v in digests(run).items() if k.startswith(("snapshots/step-000010", "final"))} for run in
            (whole, killed)]  # fmt: skip
    assert last[0] == last[1]
    assert record(whole) == record(killed)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(whole / "final")), our_logits(whole))
    assert "trained further from final" in (whole / "final/README.md").read_text()


def test_a_quantized_base_is_quantized_as_before(home: Path) -> None:
    quantized = {"model__adapter": "lora", "model__base_precision": "int8"}
    first = made(home, "int8", **quantized)
    second = continued(home, "int8-again", first / "final")
    settings_of_both = [json.loads((run / "final/adapter_config.json").read_text()) for run in (first, second)]
    assert [found["auto_mapping"]["base_precision"] for found in settings_of_both] == ["int8", "int8"]
    losses = [event["loss"] for run in (first, second) for event in events_of(run, "eval")]
    assert losses[-1] < losses[0]


def test_preferences_are_compared_with_the_adapter_before_the_run(home: Path, capsys: Captured) -> None:
    first = made(home, "chat", model__adapter="lora", model__merge_adapter="false")
    pairs = {"task": "preference", "model.name_or_path": first / "final", "model.adapter": "continue"}
    data = {"data.dataset_name": home / "pairs.jsonl", "training.learning_rate": 1e-12, "training.max_steps": 1}
    run = train_once(home / "preferred", options(TINY, pairs, data))
    assert events_of(run, "eval")[-1]["margin"] == pytest.approx(0, abs=1e-4)
    capsys.readouterr()
    assert cli(["eval", str(run), "--data", str(home / "pairs.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["margin"] == pytest.approx(0, abs=1e-4)


def labels(home: Path, name: str, **changes: object) -> Path:
    chosen = {"task": "classify", "model.name_or_path": model_folder("bert"), "model.adapter": "lora"}
    data = {"data.dataset_name": home / "labels.jsonl", "model.merge_adapter": "false", "training.max_steps": 8}
    return train_once(home / name, options(TINY, chosen, data, changes))


def test_a_classifier_leaves_with_its_labels_and_is_trained_further(home: Path, capsys: Captured) -> None:
    run = labels(home, "labels")
    found = []
    for target in (run, run / "final"):
        capsys.readouterr()
        assert cli(["predict", str(target), "--text", "a red house", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert list(found[1]["scores"]) == ["cold", "warm"]
    assert found[0]["scores"] == pytest.approx(found[1]["scores"], abs=1e-4)
    further = {"model.name_or_path": run / "final", "model.adapter": "continue"}
    again = labels(home, "labels-again", **further)
    assert events_of(again, "eval")[-1]["loss"] < events_of(run, "eval")[-1]["loss"]
    capsys.readouterr()
    other = options(TINY, {"task": "classify", "data.dataset_name": home / "labels.jsonl"}, further)
    assert cli(["train", *other, "--set", "data.labels=[warm, cold]", "--output-dir", str(home / "other")]) == 2
    assert 'has an adapter with the labels ["cold", "warm"]' in sentence(capsys)


def test_an_embedding_model_leaves_with_its_pooling(home: Path, tmp_path: Path) -> None:
    rows = home / "anchors.jsonl"
    write_rows(rows, [{"anchor": f"red {n}", "positive": f"blue {n}", "text": f"red {n}"} for n in range(40)])
    own = {"task": "embed", "model.name_or_path": model_folder("bert"), "data.dataset_name": rows}
    adapted = {"model.adapter": "lora", "model.pooling": "cls", "model.merge_adapter": "false"}
    run = train_once(home / "embed", options(TINY, own, adapted))
    found = []
    for target in (run, run / "final"):
        output = tmp_path / f"{target.name}.npy"
        assert cli(["embed", str(target), "--data", str(rows), "--output", str(output), "--precision", "fp32"]) == 0
        found.append(np.load(output))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    further = {"model.name_or_path": run / "final", "model.adapter": "continue", "model.pooling": "auto"}
    again = train_once(home / "embed-again", options(TINY, own, further))
    assert json.loads((again / "final/1_Pooling/config.json").read_text())["pooling_mode_cls_token"]


@pytest.mark.long
def test_an_adapter_on_the_hub_is_used_and_trained_further(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, rows = written_by_peft(tmp_path / "adapter"), str(home / "chat.jsonl")
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    with serving(Hub("me/adapter", adapter, kind="models")) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        code, out, error = finish_apart(["eval", "me/adapter", "--data", rows, "--json"], home / "cache")
        assert code == 0, error
        wanted = settings(home, model__name_or_path="me/adapter", model__adapter="continue", **UNTRAINED)
        code, _, error = finish_apart(["train", *wanted, "--output-dir", str(tmp_path / "run")], home / "cache")
        assert code == 0, error
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")), peft_logits(adapter), rtol=1e-4, atol=1e-4
    )
    assert json.loads(out)["loss"] > 0


def refusal(home: Path, adapter: Path, capsys: Captured, *more: str, task: str = "sft") -> str:
    chosen = settings(home, task, model__name_or_path=adapter, model__adapter="continue")
    assert cli(["train", *chosen, *more, "--output-dir", str(home / "refused"), "--dry-run"]) == 2
    return sentence(capsys)


def test_keys_of_new_adapters_are_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    adapter = written_by_peft(tmp_path / "adapter")
    assert "lora_rank has no effect with adapter continue" in refusal(
        home, adapter, capsys, "--set", "model.lora_rank=8"
    )
    assert "has no adapter_config.json" in refusal(home, model_folder("qwen2"), capsys)
    assert 'contains an adapter for "CAUSAL_LM", but this command needs one' in refusal(
        home, adapter, capsys, "--set", f"data.dataset_name={home / 'labels.jsonl'}", task="classify"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, 'an adapter of type "IA3", but sansgpu supports only LoRA and DoRA'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save ["lm_head"], which sansgpu cannot train'),
        ({"bias": "all"}, 'bias "all", which sansgpu cannot train'),
        ({"init_lora_weights": "pissa_niter_16"}, 'init_lora_weights "pissa_niter_16", which sansgpu cannot train'),
        ({"target_modules": ["nothing"]}, "does not match its base model"),
        ({"r": 8}, "does not match its base model"),
        ({"r": "many"}, 'has the rank "many"'),
        ({"base_model_name_or_path": "/missing"}, "its base model /missing does not exist"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(
    home: Path, tmp_path: Path, changes: dict[str, Any], message: str, capsys: Captured
) -> None:
    file = written_by_peft(tmp_path / "adapter") / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert message in refusal(home, file.parent, capsys)


def test_damaged_weights_are_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    file = written_by_peft(tmp_path / "adapter") / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: weight for name, weight in weights.items() if "layers.0" not in name}, file)
    assert "does not match its base model" in refusal(home, file.parent, capsys)
    file.write_bytes(b"nothing")
    assert "adapter_model.safetensors" in refusal(home, file.parent, capsys)
    file.unlink()
    assert "does not match its base model" in refusal(home, file.parent, capsys)

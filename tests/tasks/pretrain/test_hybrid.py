"""A decoder of gated delta nets and attention is trained, resumed, evaluated, exported and generates text."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sansgpu.cli import run as cli
from sansgpu.models.formats.decoder_folder import load_decoder
from sansgpu.train.optim import parameter_groups
from tests.models.small import model_of
from tests.processes import (
    Captured,
    digests,
    events_of,
    finish,
    kill_when,
    record,
    settings,
    start,
    train_once,
)

HYBRID = {"model__architecture": "qwen3_5_text", "model__n_layers": 5, "training__max_steps": 10}


def arguments(home: Path, **changes: object) -> list[str]:
    return settings(data__dataset_name=home / "corpus.jsonl", **{**HYBRID, **changes})


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    return train_once(home / "run", arguments(home))


def test_the_loss_falls(trained: Path) -> None:
    losses = [step["loss"] for step in events_of(trained, "step")]
    assert losses[-1] < losses[0] - 0.5


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(home: Path) -> None:
    longer = arguments(home, model__d_model=64, training__max_steps=24)
    runs = [home / "whole", home / "killed"]
    commands = [["train", *longer, "--output-dir", str(run)] for run in runs]
    code, _, error = finish(commands[0], home / "cache")
    assert code == 0, error
    killed = kill_when(start(commands[1], home / "cache"), lambda: any(runs[1].glob("snapshots/step-*")))
    assert killed == -9
    code, _, error = finish([*commands[1], "--resume"], home / "cache")
    assert code == 0, error
    last = ("snapshots/step-000024", "final")
    whole, resumed = ({name: d for name, d in digests(run).items() if name.startswith(last)} for run in runs)
    assert resumed == whole
    assert record(runs[1]) == record(runs[0])


def test_transformers_computes_the_exported_model(trained: Path) -> None:
    ours, theirs = load_decoder(trained / "final"), AutoModelForCausalLM.from_pretrained(trained / "final")
    assert ours is not None
    assert theirs.config.layer_types == ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_generated_text_is_that_of_transformers(trained: Path, capsys: Captured) -> None:
    asked = ["generate", str(trained), "--prompt", "the model", "--max-new-tokens", "16", "--temperature", "0"]
    assert cli(asked) == 0
    text = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(trained / "final")
    theirs = AutoModelForCausalLM.from_pretrained(trained / "final")
    prompt = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("the model", add_special_tokens=False)]])
    ids = theirs.generate(prompt, max_new_tokens=16, do_sample=False)[0]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text.strip()


def test_plan_and_eval_describe_the_trained_model(home: Path, trained: Path, capsys: Captured) -> None:
    assert cli(["plan", *arguments(home), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    final = load_decoder(trained / "final")
    assert final is not None
    assert plan["parameters"] == final.parameter_count
    assert cli(["eval", str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(events_of(trained, "eval")[-1]["loss"], rel=1e-5)


def test_only_linear_layers_may_use_muon() -> None:
    groups, prefix = parameter_groups(model_of("hybrid")), "blocks.0.net."
    matrices, filters, others = (
        [name.removeprefix(prefix) for name, _ in group if name.startswith(prefix)]
        for group in (groups.matrices, groups.filters, groups.others)
    )
    assert matrices == [f"{layer}.weight" for layer in ("qkv", "gate", "steps", "decays", "out")]
    assert filters == ["convolution.weight"]
    assert sorted(others) == ["A_log", "dt_bias", "norm.weight"]


def test_a_bias_is_refused(home: Path, capsys: Captured) -> None:
    assert cli(["train", *arguments(home, model__bias="attention"), "--output-dir", str(home / "refused")]) == 2
    assert "architecture qwen3_5_text requires bias none, but it is attention" in capsys.readouterr().err

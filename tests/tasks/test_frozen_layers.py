"""Training the last blocks of a model, whose inputs are computed once for all epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sansgpu.cli import run as cli
from sansgpu.events.progress import ignore_progress
from sansgpu.machine.distributed.group import SINGLE_PROCESS
from sansgpu.tasks.capabilities import ActivationOwner
from sansgpu.tasks.configuration import load_config
from tests.processes import digests, events_of, finish, json_of, kill_when, record, start
from tests.tasks.fine_tuned import Captured, sentence
from tests.tasks.folders import model_folder
from tests.tasks.frozen import EPOCHS, LORA, arrays_in, chosen, losses_of, made, task_with_data, weights_in
from tests.tasks.frozen import fill as fill

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(
    ("task", "architecture", "changes"),
    [
        ("classify", "bert", {}),
        ("classify", "deberta-v2", LORA),
        ("tokens", "modernbert", {}),
        ("embed", "bert", LORA),
        ("sft", "llama", {}),
        ("sft", "qwen2", LORA),
        ("sft", "gemma3_text", LORA),
        ("sft", "gpt2", {"data.pack_sequences": "false"}),
        ("preference", "qwen2", LORA),
    ],
)
def test_kept_activations_change_no_loss_and_no_gradient(
    home: Path, tmp_path: Path, task: str, architecture: str, changes: dict[str, object]
) -> None:
    made_task = task_with_data(home, task, architecture, changes)
    unpadded = made_task.objective.unpadded
    made_task.model.train()
    for module in made_task.model.modules():  # trained layers draw the same random numbers only one after the other
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def outcome() -> dict[str, torch.Tensor]:
        made_task.model.zero_grad()
        batch = made_task.corpus.train.batch(np.array([0, 5, 3, 7]))
        torch.manual_seed(0)
        loss = made_task.objective.loss(batch)
        loss.backward()
        found = {n: p.grad.clone() for n, p in made_task.model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **found}

    plain = outcome()
    place = torch.device("cpu"), "fp32", tmp_path, ignore_progress, SINGLE_PROCESS
    assert made_task.keep_activations(*place) is None
    ran = []
    unpadded.frozen.blocks[0].forward = lambda *args, **kwargs: ran.append(True)
    kept = outcome()
    assert not ran
    assert plain.keys() == kept.keys()
    assert len(plain) > 4
    for name, value in plain.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-5, atol=1e-5)


# Runs


@pytest.mark.parametrize("task", ["classify", "sft"])
def test_a_run_of_several_epochs_keeps_activations_and_learns_the_same(home: Path, tmp_path: Path, task: str) -> None:
    architecture = "bert" if task == "classify" else "qwen2"
    cache = {"data.cache_dir": tmp_path / "cache"}
    kept = made(home, f"kept-{task}", task, architecture, EPOCHS, cache)
    computed = arrays_in(tmp_path / "cache")
    assert computed
    plain = made(home, f"plain-{task}", task, architecture, EPOCHS, cache, {"model.keep_activations": "false"})
    assert arrays_in(tmp_path / "cache") == computed
    assert losses_of(kept) == pytest.approx(losses_of(plain), rel=1e-4)
    assert load_config(kept / "config.yaml")[0].model.keep_activations is True
    made(home, f"again-{task}", task, architecture, EPOCHS, cache)  # reads them from the cache
    assert arrays_in(tmp_path / "cache") == computed
    assert losses_of(home / f"again-{task}") == losses_of(kept)


def test_a_run_of_one_epoch_keeps_no_activations(home: Path, tmp_path: Path) -> None:
    once = {"training.max_steps": 2, "data.cache_dir": tmp_path / "cache"}
    run = made(home, "once", "classify", "bert", once)
    assert arrays_in(tmp_path / "cache") == {}
    assert load_config(run / "config.yaml")[0].model.keep_activations is False


def test_only_the_last_blocks_change(home: Path, capsys: Captured) -> None:
    run = made(home, "changed", "classify", "bert", EPOCHS)
    before, after = weights_in(model_folder("bert")), weights_in(run / "final")
    changed = {name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])}
    assert changed
    assert all("layer.1." in name or "pooler." in name for name in changed)
    assert any("layer.0." in name for name in before.keys() & after.keys())
    last = events_of(run, "eval")[-1]
    assert json_of(capsys, "eval", run)["loss"] == pytest.approx(last["loss"], rel=1e-4)


def test_an_adapter_is_only_in_the_last_blocks(home: Path) -> None:
    run = made(home, "lora", "sft", "qwen2", LORA, EPOCHS, {"model.merge_adapter": "false"})
    names = load_file(run / "final/adapter_model.safetensors").keys()
    assert names
    assert all(".layers.1." in name for name in names)


def outcome(run: Path) -> tuple[dict[str, str], list[dict[str, object]]]:
    kept = {k: v for k, v in digests(run).items() if k.startswith("final") or "step-000010" in k}
    assert len(kept) == 3
    return kept, record(run)


def test_a_killed_run_resumes_byte_for_byte(home: Path, tmp_path: Path) -> None:
    steps = {"training.max_steps": 10, "training.gradient_accumulation_steps": 8}
    arguments = chosen(home, "sft", "qwen2", LORA, steps)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    code, _, error = finish(["train", *arguments, "--output-dir", str(straight)], tmp_path / "cache")
    assert code == 0, error
    command = ["train", *arguments, "--output-dir", str(killed)]
    assert kill_when(start(command, tmp_path / "other"), (killed / "snapshots/step-000002/MANIFEST.json").exists) == -9
    assert not (killed / "final").exists()
    code, _, error = finish([*command, "--resume"], tmp_path / "other")
    assert code == 0, error
    assert outcome(killed) == outcome(straight)
    assert arrays_in(tmp_path / "other")


def test_two_processes_share_the_work_and_learn_the_same(home: Path, tmp_path: Path) -> None:
    arguments = chosen(home, "classify", "bert", EPOCHS, {"data.cache_dir": tmp_path / "cache"})
    alone, together = tmp_path / "alone", tmp_path / "together"
    for run, launched in ((together, ["--processes", "2"]), (alone, [])):
        code, _, error = finish(["train", *arguments, "--output-dir", str(run), *launched], tmp_path / "commands")
        assert code == 0, error
    assert arrays_in(tmp_path / "cache")
    last = [events_of(run, "eval")[-1]["loss"] for run in (alone, together)]
    assert last[0] == pytest.approx(last[1], rel=2e-2)  # dropout differs between ranks


# Plans and refusals


def test_a_plan_knows_what_is_kept(home: Path, capsys: Captured) -> None:
    def plan(*changes: dict[str, object]) -> dict[str, Any]:
        arguments = chosen(home, "classify", "bert", EPOCHS, *changes)
        capsys.readouterr()
        assert cli(["plan", *arguments, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    kept, plain, whole = plan(), plan({"model.keep_activations": "false"}), plan({"model.trained_layers": ""})
    task = task_with_data(home, "classify", "bert", EPOCHS)
    assert kept["kept_bytes"] == 4 * 64 * type(task).kept_tokens(task.corpus)
    assert plain["kept_bytes"] == whole["kept_bytes"] == 0
    assert kept["memory_bytes"]["optimizer"] == plain["memory_bytes"]["optimizer"]
    assert kept["memory_bytes"]["optimizer"] < whole["memory_bytes"]["optimizer"] / 2
    assert kept["memory_bytes"]["activations"] < whole["memory_bytes"]["activations"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.trained_layers": 3}, "has only 2 blocks"),
        ({"model.trained_layers": 0}, "greater than or equal to 1"),
        ({"model.trained_layers": 1.5}, "less than or equal to 1"),
        ({"model.trained_layers": "", "model.keep_activations": "true"}, "no effect without trained_layers"),
    ],
)
def test_values_that_cannot_work_are_refused(
    home: Path, tmp_path: Path, changes: dict[str, object], words: str, capsys: Captured
) -> None:
    capsys.readouterr()
    arguments = chosen(home, "classify", "bert", changes)
    assert cli(["train", *arguments, "--output-dir", str(tmp_path / "run")]) == 2
    assert words in sentence(capsys)


def test_a_disk_that_is_too_small_is_refused(
    home: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sansgpu.tasks.kept_activations.free_disk_bytes", lambda folder: 1000)
    capsys.readouterr()
    arguments = chosen(home, "classify", "bert", EPOCHS, {"data.cache_dir": tmp_path / "cache"})
    assert cli(["train", *arguments, "--output-dir", str(tmp_path / "run")]) == 2
    assert "set model.keep_activations to false" in sentence(capsys)


def test_layers_that_draw_random_numbers_are_not_skipped(home: Path, tmp_path: Path) -> None:
    task = task_with_data(home, "classify", "bert", EPOCHS)
    block = task.objective.unpadded.frozen.blocks[-1]
    block.register_forward_hook(lambda module, args, output: output + torch.rand(()))
    place = torch.device("cpu"), "fp32", tmp_path, ignore_progress, SINGLE_PROCESS
    assert task.keep_activations(*place) == "its frozen layers draw random numbers"
    assert task.objective.unpadded.kept is None


def test_no_file_of_kept_activations_serves_runs_with_other_frozen_layers(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file depends on the model and on how it is computed, also if the data fill several."""
    monkeypatch.setattr("sansgpu.tasks.kept_activations.FILE_TOKENS", 32)
    counts = []
    owner = ActivationOwner(tmp_path / "run", lambda: False)
    for layers, keeps, by in ((1, "true", None), (1, "int8", None), (1, "true", owner)):
        changes = {"model.trained_layers": layers, "model.keep_activations": keeps}
        task = task_with_data(home, "classify", "bert", changes)
        place = torch.device("cpu"), "fp32", tmp_path
        assert task.keep_activations(*place, ignore_progress, SINGLE_PROCESS, by) is None
        counts.append(len(list(tmp_path.glob("activations/*/*.npy"))))
    assert counts[0] > 1
    assert counts == [counts[0], 2 * counts[0], 3 * counts[0]]
    task.delete_activations()
    assert len(list(tmp_path.glob("activations/*/*.npy"))) == 2 * counts[0]

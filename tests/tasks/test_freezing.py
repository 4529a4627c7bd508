"""Layers that learn for some epochs and then stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sansgpu.cli import run as cli
from sansgpu.config.training import TrainingConfig
from sansgpu.events.progress import ignore_progress
from sansgpu.machine.distributed.group import SINGLE_PROCESS
from sansgpu.models.kept_states import bytes_per_token, packed, unpacked
from sansgpu.planning.forecast import Forecast
from sansgpu.tasks.capabilities import ActivationOwner
from sansgpu.tasks.configuration import load_config
from sansgpu.train.run_length import Budget
from sansgpu.train.schedule import StepPhases, automatic_layers, freeze_step
from tests.processes import digests, events_of, finish, json_of, kill_when, record, start
from tests.scale.launch import finish_forks
from tests.tasks.fine_tuned import Captured, sentence
from tests.tasks.frozen import EPOCHS, LORA, arrays_in, chosen, losses_of, made, task_with_data, weights_in
from tests.tasks.frozen import fill as fill

pytestmark = pytest.mark.usefixtures("home")

# Three steps per epoch of classify.jsonl, of which one is all that trains all layers.
LATER: dict[str, object] = {
    **EPOCHS, "training.num_epochs": 3, "training.batch_size": 4, "training.gradient_accumulation_steps": 4,
    "training.save_steps": 1, "training.keep_last": 20, "training.eval_steps": 3, "model.freeze_after": 1,
}  # fmt: skip


def snapshots_of(run: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Returns the weights in each snapshot by step."""
    folders = sorted((run / "snapshots").glob("step-*"))
    return {int(folder.name.removeprefix("step-")): load_file(folder / "model.safetensors") for folder in folders}


def changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> set[str]:
    return {name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])}


def stop_of(run: Path) -> int:
    """Returns the number of steps in which all layers learned, according to the run's message."""
    (message,) = [event for event in events_of(run, "warning") if event.get("cause") == "layers"]
    assert "stop learning after step" in message["message"]
    return int(message["step"]) - 1


@pytest.mark.parametrize(
    ("task", "architecture", "changes"),
    [
        ("classify", "bert", {}),
        ("classify", "bert", {"training.optimizer": "muon", "training.precision": "bf16"}),
        ("tokens", "modernbert", LORA),
        ("embed", "bert", {"training.master_weights": "bf16", "training.precision": "bf16"}),
        ("sft", "qwen2", {}),  # its head shares the weights of the embedding
        ("sft", "llama", LORA),
        ("preference", "qwen2", LORA),
    ],
)
def test_lower_layers_learn_for_an_epoch_and_then_stop(
    home: Path, tmp_path: Path, task: str, architecture: str, changes: dict[str, object]
) -> None:
    cache = {"data.cache_dir": tmp_path / "cache"}
    run = made(home, f"{tmp_path.name}", task, architecture, LATER, cache, changes)
    stop, saved = stop_of(run), snapshots_of(run)
    assert stop < max(saved)
    lower = {name for name in changed(saved[1], saved[stop]) if "layers.0." in name or "layer.0." in name}
    assert lower
    later = changed(saved[stop], saved[max(saved)])
    assert any("layers.1." in name or "layer.1." in name for name in later)
    assert not [name for name in later if "layers.0." in name or "layer.0." in name or "embed" in name]
    assert load_config(run / "config.yaml")[0].model.keep_activations is True
    assert arrays_in(tmp_path / "cache") == {}  # deleted at the end, as no other run can use them


def test_the_exported_model_has_what_the_lower_layers_learned(home: Path, capsys: Captured) -> None:
    for name, changes in (("whole", {}), ("adapter", LORA)):
        run = made(home, f"exported-{name}", "classify", "bert", LATER, {"training.precision": "bf16"}, changes)
        before = weights_in(Path(load_config(run / "config.yaml")[0].model.name_or_path or ""))
        assert any("layer.0." in key for key in changed(before, weights_in(run / "final")))
        last = events_of(run, "eval")[-1]
        assert json_of(capsys, "eval", run)["loss"] == pytest.approx(last["loss"], rel=2e-2)


@pytest.mark.parametrize("form", ["false", "int8"])
def test_kept_activations_change_losses_slightly_at_most(home: Path, form: str) -> None:
    no_dropout = {"training.threads": 1}
    kept = made(home, "kept-true", "classify", "bert", LATER, no_dropout)
    other = made(home, f"kept-{form}", "classify", "bert", LATER, no_dropout, {"model.keep_activations": form})
    tolerance = 1e-4 if form == "false" else 2e-2
    assert losses_of(kept) == pytest.approx(losses_of(other), rel=tolerance)
    assert form == "false" or losses_of(kept) != losses_of(other), "some processors round equally without int8"
    stop = stop_of(kept)
    assert [e["loss"] for e in events_of(kept, "step")][:stop] == [e["loss"] for e in events_of(other, "step")][:stop]


def test_later_steps_count_fewer_operations(home: Path) -> None:
    task = task_with_data(home, "classify", "bert", LATER)
    before = task.flops_per_token
    assert task.freeze_layers() == (1, 2)
    frozen = task_with_data(home, "classify", "bert", LATER, {"model.freeze_after": 0})
    assert task.flops_per_token == frozen.flops_per_token < before


# Resuming


def outcome(run: Path) -> tuple[dict[str, str], list[dict[str, object]]]:
    return digests(run), record(run)


def test_a_run_resumes_byte_for_byte_before_at_and_after_the_stop(home: Path, tmp_path: Path) -> None:
    straight = made(home, "straight", "classify", "bert", LATER)
    stop = stop_of(straight)
    for step in (stop - 1, stop, stop + 1):
        resumed = tmp_path / str(step)
        shutil.copytree(straight, resumed)
        shutil.rmtree(resumed / "final")
        assert cli(["train", "--output-dir", str(resumed), "--resume", f"step-{step:06d}"]) == 0
        found = {name: value for name, value in digests(resumed).items() if "abandoned" not in name}
        assert found == digests(straight), step
        assert record(resumed) == record(straight), step


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_killed_run_resumes_byte_for_byte(home: Path, tmp_path: Path, step: int) -> None:
    given = "sft", "qwen2", LATER, LORA, {"training.num_epochs": 8}
    straight, killed = made(home, "straight-sft", *given), tmp_path / "killed"
    assert stop_of(straight) == 2
    command = ["train", *chosen(home, *given), "--output-dir", str(killed)]
    manifest = killed / f"snapshots/step-{step:06d}/MANIFEST.json"
    assert kill_when(start(command, tmp_path / "cache"), manifest.exists) == -9
    assert not (killed / "final").exists()
    code, _, error = finish([*command, "--resume"], tmp_path / "cache")
    assert code == 0, error
    assert outcome(killed) == outcome(straight)
    assert arrays_in(tmp_path / "cache") == {}


def skips(task: Any) -> bool:
    return task.objective.unpadded.kept is not None


def test_an_interrupted_computation_of_activations_keeps_none(home: Path, tmp_path: Path) -> None:
    task = task_with_data(home, "classify", "bert", LATER)
    task.freeze_layers()
    place = torch.device("cpu"), "fp32", tmp_path, ignore_progress, SINGLE_PROCESS
    assert task.keep_activations(*place, ActivationOwner(tmp_path, lambda: True)) is None
    assert not skips(task)
    assert arrays_in(tmp_path) == {}
    assert task.keep_activations(*place, ActivationOwner(tmp_path, lambda: False)) is None
    assert skips(task)
    first = arrays_in(tmp_path)
    next(task.objective.unpadded.frozen.blocks[0].parameters()).data.add_(0.1)
    assert task.keep_activations(*place, ActivationOwner(tmp_path, lambda: False)) is None
    assert len(arrays_in(tmp_path)) == 2 * len(first)  # other weights, other files
    task.delete_activations()
    assert arrays_in(tmp_path) == first


def test_a_signal_while_activations_are_computed_ends_the_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, run = made(home, "straight", "classify", "bert", LATER), tmp_path / "run"
    compute = "sansgpu.tasks.kept_activations.ActivationFiles._write"
    with monkeypatch.context() as patch:
        patch.setattr(compute, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        patch.setattr("sansgpu.tasks.kept_activations.FILE_TOKENS", 32)
        assert cli(["train", *chosen(home, "classify", "bert", LATER), "--output-dir", str(run)]) != 0
    assert max(snapshots_of(run)) == stop_of(straight)
    shutil.rmtree(home / "cache/activations")  # with the empty file
    assert cli(["train", "--output-dir", str(run), "--resume"]) == 0
    assert outcome(run) == outcome(straight)


# Several processes


@pytest.mark.parametrize("changes", [{"training.sharding": "optimizer"}, {"training.sync_every": 2}])
def test_several_processes_stop_together(home: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    arguments = chosen(home, "classify", "bert", LATER, changes, {"data.cache_dir": tmp_path / "cache"})
    run = tmp_path / "run"
    code, said = finish_forks(2, ["train", *arguments, "--output-dir", str(run)], tmp_path / "commands")
    assert code == 0, said
    stop, saved = stop_of(run), snapshots_of(run)
    assert stop == (4 if changes.get("training.sync_every") else 3)
    later = changed(saved[stop], saved[max(saved)])
    assert later
    assert not [name for name in later if "layer.0." in name or "embeddings" in name]
    if "training.sync_every" not in changes:
        losses = [
            events_of(folder, "eval")[-1]["loss"] for folder in (run, made(home, "straight", "classify", "bert", LATER))
        ]
        assert losses[0] == pytest.approx(losses[1], rel=0.1)  # dropout differs between ranks


def test_weights_that_are_split_over_processes_cannot_stop(home: Path, tmp_path: Path) -> None:
    arguments = chosen(home, "classify", "bert", LATER, {"training.sharding": "full"})
    code, said = finish_forks(2, ["train", *arguments, "--output-dir", str(tmp_path / "run")], tmp_path / "commands")
    assert code != 0
    assert "layers cannot stop learning" in said


# Plans and refusals


def plan(home: Path, capsys: Captured, *changes: Mapping[str, object]) -> dict[str, Any]:
    capsys.readouterr()
    assert cli(["plan", *chosen(home, "classify", "bert", LATER, *changes), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_knows_both_parts_of_a_run(home: Path, capsys: Captured) -> None:
    later, int8 = plan(home, capsys), plan(home, capsys, {"model.keep_activations": "int8"})
    whole = plan(home, capsys, {"model.trained_layers": "", "model.freeze_after": ""})
    frozen = plan(home, capsys, {"model.freeze_after": ""})
    assert later["freeze_step"] == plan(home, capsys, {"model.trained_layers": 2})["freeze_step"] == 3
    assert whole["freeze_step"] is frozen["freeze_step"] is None
    assert later["later_step_seconds"] <= later["step_seconds"]  # equal if other programs disturbed the timed steps
    assert later["memory_bytes"] == whole["memory_bytes"]
    assert later["kept_bytes"] == frozen["kept_bytes"]
    assert int8["kept_bytes"] == later["kept_bytes"] * (64 + 4) // (64 * 4)


@pytest.mark.parametrize("done", [0, 5, 10, 15])
def test_a_forecast_adds_up_both_parts(done: int) -> None:
    training = TrainingConfig(eval_steps=10, save_steps=0)
    phases = StepPhases(freeze_step=10, later_work=0.25, freezing_work=3.0)
    forecast = Forecast(0.0, 2.0, 100.0, 0.0, 0.0, phases, later_evaluation_seconds=10.0)
    steps = {0: 20.0 + 6.0 + 10.0, 5: 10.0 + 6.0 + 10.0, 10: 6.0 + 10.0, 15: 2.5 + 5.0 - 5.0}
    evaluations = {0: 110.0, 5: 110.0, 10: 10.0, 15: 10.0}
    assert forecast.seconds(training, 30 if done < 15 else 20, done) == pytest.approx(
        steps[done] + evaluations[done] + (10.0 if done < 15 else 0.0)
    )


def test_a_budget_plans_with_the_pace_of_both_parts() -> None:
    clock, phases = 0.0, StepPhases(freeze_step=50, later_work=0.25, freezing_work=10.0)
    training = TrainingConfig(max_hours=200 / 3600, eval_steps=0, save_steps=0)
    budget = Budget(training, lambda: clock, 0.0, 0, 0, phases=phases)
    budget.record_evaluation(0.0)
    for done in range(1, 200):
        seconds = 1.0 if done <= 50 else 0.25
        clock += seconds + (10.0 if done == 51 else 0.0)
        if done == 51:
            budget.forget_steps()
        budget.record_step(seconds)
        left = budget.steps_left(done)
        assert left is not None
        assert done + left == pytest.approx(50 + (200 - 60 - 3) / 0.25, abs=2)


def test_the_step_of_the_stop_depends_on_the_data_alone() -> None:
    assert [freeze_step(*given) for given in ((1, 10, 1), (0.5, 5, 1), (0.1, 30, 1), (1, 10, 4), (0.001, 10, 1))] == [
        10, 3, 3, 12, 1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.trained_layers": ""}, "freeze_after has no effect without trained_layers"),
        ({"model.freeze_after": 3}, "freeze_after is 3, but training.num_epochs is 3"),
        ({"model.freeze_after": -1}, "greater than or equal to 0"),
        ({"model.keep_activations": "int4"}, "int8"),
    ],
)
def test_values_that_cannot_work_are_refused(
    home: Path, tmp_path: Path, changes: dict[str, object], words: str, capsys: Captured
) -> None:
    capsys.readouterr()
    assert cli(["train", *chosen(home, "classify", "bert", LATER, changes), "--output-dir", str(tmp_path / "r")]) == 2
    assert words in sentence(capsys)


def test_a_run_that_ends_before_the_stop_says_so(home: Path, capsys: Captured) -> None:
    arguments = chosen(home, "classify", "bert", LATER, {"training.num_epochs": "", "training.max_steps": 2})
    capsys.readouterr()
    assert cli(["train", *arguments, "--dry-run"]) == 0
    assert "all layers are trained throughout" in capsys.readouterr().err


@pytest.mark.parametrize(("epochs", "share"), [(2, None), (3, 0.5)])
def test_layers_are_chosen_automatically(
    home: Path, tmp_path: Path, capsys: Captured, epochs: int, share: float | None
) -> None:
    auto = {"model.trained_layers": "auto", "model.freeze_after": "", "training.num_epochs": epochs}
    run, arguments = tmp_path / "run", chosen(home, "classify", "bert", LATER, auto, {"training.save_steps": 2})
    capsys.readouterr()
    assert cli(["train", *arguments, "--output-dir", str(run)]) == 0
    assert "model.trained_layers auto trains all layers" in capsys.readouterr().out
    settings = load_config(run / "config.yaml")[0].model
    assert (settings.trained_layers, settings.freeze_after) == (share, 1.0 if share else None)
    weights = digests(run / "final")
    shutil.rmtree(run / "final")
    shutil.rmtree(max((run / "snapshots").glob("step-*")))
    code = cli(["train", *arguments, "--output-dir", str(run), "--resume"])
    assert code == 0, capsys.readouterr().err
    assert digests(run / "final") == weights


def test_short_runs_train_all_layers() -> None:
    assert automatic_layers(2.9) == {"trained_layers": None, "freeze_after": None, "keep_activations": None}
    assert automatic_layers(3.0)["freeze_after"] == 1.0


# 8-bit activations


def test_int8_activations_are_within_half_a_step_of_their_scale() -> None:
    draws = torch.Generator().manual_seed(0)
    states = torch.randn(50, 64, generator=draws) * torch.logspace(-6, 6, 50)[:, None]
    states[3] = 0.0
    stored = packed(states, "int8")
    assert stored.nbytes == 50 * bytes_per_token("int8", 64) < packed(states, "bf16").nbytes * 0.6
    error = (unpacked(stored) - states).abs().numpy()
    bound = states.abs().amax(dim=1, keepdim=True).numpy() / 254
    assert np.all(error <= bound * 1.001)
    assert torch.equal(unpacked(stored)[3], states[3])

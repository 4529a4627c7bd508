"""A finished run prints its loss curve, samples of the model, the path of its report, and commands that work."""

import shlex
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.config import RunPaths
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.views.record import RunRecord
from sansgpu.views.run_end import commands
from tests import processes

Captured = pytest.CaptureFixture[str]
SAMPLED = {
    "training__max_steps": 6,
    "training__eval_steps": 3,
    "training__eval_on_start": True,
    "training__sample_tokens": 8,
    "training__sample_prompt": "the word",
    "training__sample_temperature": 0,
}


@pytest.fixture(scope="module")
def ended(home: Path) -> tuple[Path, str]:
    """Trains a run; returns its folder and everything that it printed."""
    run, given = home / "ended run", processes.settings(data__dataset_name=home / "corpus.jsonl", **SAMPLED)
    code, out, _ = processes.finish(["train", *given, "--output-dir", str(run)], home / "cache")
    assert code == 0
    return run, out


def after_training(printed: str) -> list[str]:
    lines = printed.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("done after step"))
    return lines[place + 1 :]


def test_the_curve_spans_the_losses_and_steps_of_the_run(ended: tuple[Path, str]) -> None:
    lines = after_training(ended[1])
    assert "Loss: training, validation" in lines
    first = lines.index("Loss: training, validation") + 1
    losses = [event["loss"] for event in RunRecord.open(ended[0]).steps]
    assert lines[first].split()[0] == f"{max(losses):.2f}"
    axis = next(line.split() for line in lines[first:] if line.strip().startswith("step "))
    assert axis == ["step", "2", "6"]


def test_the_model_writes_before_half_way_and_after(ended: tuple[Path, str]) -> None:
    lines = after_training(ended[1])
    places = [lines.index(f"  {place}") for place in ("before training", "after step 3", "after step 6")]
    assert places == sorted(places)
    for place, event in zip(places, RunRecord.open(ended[0]).evaluations, strict=True):
        assert lines[place + 1].startswith("    the word")
        assert event["sample"].splitlines()[0].rstrip() in lines[place + 1] + " "


def test_the_report_and_every_command_that_is_named_work(
    ended: tuple[Path, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = after_training(ended[1])
    assert f"Report: {ended[0] / 'report.html'}" in lines
    assert (ended[0] / "report.html").is_file()
    processes.use_cache(monkeypatch, home / "cache")
    named = [shlex.split(line) for line in lines if line.startswith("  sansgpu ")]
    assert [command[1] for command in named] == ["generate", "eval", "export"]
    assert "the word" in named[0]
    for command in named:
        assert cli(command[1:]) == 0, command


@pytest.mark.parametrize("kind", sorted(SCHEMA.tasks.kinds))
def test_every_task_names_what_can_be_done_with_its_models(kind: str, tmp_path: Path) -> None:
    settings = SCHEMA.tasks.kinds[kind]
    config = {"task": settings.task, "model": {}, "training": {}}
    record = RunRecord(RunPaths(tmp_path), config, {}, [])
    record.__dict__["settings"] = settings
    found = commands(record)
    decoder = settings.task in ("pretrain", "sft", "preference", "grpo")
    assert found[-1] == f"sansgpu export {tmp_path} --format {'gguf' if decoder else 'hf'}"
    assert all(line.startswith("sansgpu ") and "MODEL" not in line for line in found)


def test_headless_output_is_only_json_lines(home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    processes.use_cache(monkeypatch, home / "cache")
    assert processes.train(home, home / "headless", "--headless", **SAMPLED) == 0
    assert all(line.startswith("{") for line in capsys.readouterr().out.splitlines())

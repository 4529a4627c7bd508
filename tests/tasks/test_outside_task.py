"""A task in one file outside the package works with every command."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from sansgpu.cli import run as cli
from tests.processes import WORDS, digests, events_of, finish, kill_when, record, settings, start

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/examples/sentence_order.py"
TASK = "sentence_order:SentenceOrder"
NAMED = ("--objective", TASK)
STEPS = 240
CHANGES = {
    "task": TASK,
    "model__dropout": 0.0,
    "model__max_seq_len": 48,
    "data__validation_split": 0.2,
    "data__swap_ratio": 0.4,
    "training__batch_size": 4,
    "training__optimizer": "adamw",
    "training__learning_rate": 0.003,
    "training__max_steps": STEPS,
    "training__save_steps": 20,
    "training__eval_steps": 40,
}


def write_stories(path: Path) -> Path:
    """Writes documents of three sentences, which begin with First, Then and Finally."""
    draw, words = random.Random(0), WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(150):
            rest = (" ".join(draw.choice(words) for _ in range(draw.randint(3, 6))) for _ in range(3))
            text = " ".join(f"{first} {said}." for first, said in zip(("First", "Then", "Finally"), rest, strict=True))
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FILE.parent), os.environ.get("PYTHONPATH", str(ROOT / "src"))]))
        yield


def fill(home: Path) -> None:
    write_stories(home / "stories.jsonl")


def configured(home: Path, **changes: object) -> list[str]:
    return settings(data__dataset_name=home / "stories.jsonl", **{**CHANGES, **changes})


def ran(home: Path, *arguments: str) -> str:
    """Runs a command in a separate process and returns its standard output."""
    code, out, error = finish([*arguments], home / "cache")
    assert code == 0, error
    return out


def refused(home: Path, *arguments: str) -> str:
    """Runs a command that must fail with a single error message, and returns that message."""
    code, _, error = finish([*arguments], home / "cache")
    assert code == 2, error
    (line,) = [line for line in error.splitlines() if line.startswith("sansgpu: ")]
    assert "Traceback" not in error
    return line


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    ran(home, "train", *configured(home), "--output-dir", str(home / "run"), "--plain")
    return home / "run"


def test_it_is_short_and_shown_to_contributors() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 135
    assert "](docs/examples/sentence_order.py)" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_it_is_planned_and_measured(home: Path, run: Path) -> None:
    dry = yaml.safe_load(ran(home, "train", *configured(home), "--dry-run", "--output-dir", str(home / "dry")))
    assert dry["config"]["task"] == TASK
    assert "leaves" not in dry["config"]["model"]
    assert dry["config"]["data"]["swap_ratio"] == 0.4
    planned = json.loads(ran(home, "plan", *configured(home), "--json"))
    measured = json.loads(
        ran(home, "bench", *configured(home), "--steps", "5", "--no-what-if", "--json", "--output-dir", f"{home}/bench")
    )
    weights = load_file(run / "final/model.safetensors")
    counted = sum(tensor.numel() for tensor in weights.values())
    assert dry["run"]["parameters"] == planned["parameters"] == measured["parameters"] == counted
    assert planned["fits"]
    assert planned["total_steps"] == STEPS
    assert planned["step_seconds"] > 0
    assert measured["step_seconds"]["median"] > 0


def test_it_learns_is_evaluated_and_answers_rows(home: Path, run: Path) -> None:
    last = events_of(run, "eval")[-1]
    assert last["accuracy"] > 0.9
    evaluated = json.loads(ran(home, "eval", str(run), *NAMED, "--json"))
    assert evaluated["accuracy"] == last["accuracy"]
    assert evaluated["loss"] == pytest.approx(last["loss"], rel=1e-5)
    pairs = [("First the model learns.", "Then it reads a page."), ("Finally it reads a page.", "Then it learns.")]
    rows = home / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"first": first, "second": second}) for first, second in pairs))
    printed = ran(home, "predict", str(run), *NAMED, "--data", str(rows))
    assert [json.loads(line)["label"] for line in printed.splitlines()] == ["in order", "swapped"]
    ran(home, "predict", str(run), *NAMED, "--data", str(rows), "--output", str(home / "answers.jsonl"))
    assert (home / "answers.jsonl").read_text() == printed


@pytest.mark.long
def test_a_killed_run_resumes_byte_identically(home: Path, run: Path) -> None:
    killed = home / "killed"
    process = start(["train", *configured(home), "--output-dir", str(killed), "--plain"], home / "cache")
    assert kill_when(process, (killed / "snapshots/step-000020/MANIFEST.json").exists) == -9
    assert not (killed / "final").exists()
    again = ("train", "--resume", "--output-dir", str(killed), "--plain")
    assert f"add --objective {TASK}" in refused(home, *again)
    ran(home, *again, *NAMED)
    assert digests(killed) == digests(run)
    assert record(killed) == record(run)


def test_its_runs_are_shown_without_its_code(home: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
    assert "run" in ran(home, "runs", str(home))
    assert ran(home, "snapshots", "verify", str(run)).count("ok") == 3
    ran(home, "report", str(run))
    assert "accuracy" in (run / "report.html").read_text(encoding="utf-8")
    assert "cannot be imported" in refused(home, "eval", str(run), *NAMED)


def test_it_is_exported_with_its_tokenizer(home: Path, run: Path) -> None:
    ran(home, "export", str(run), *NAMED, "--format", "hf", "--output", str(home / "hf"))
    assert {path.name for path in (home / "hf").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "README.md",
    }
    assert digests(home / "hf") == digests(run / "final")


@pytest.mark.usefixtures("home")
def test_its_code_runs_only_if_it_is_named(home: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = str(home / "stories.jsonl")
    for command in (
        ["eval"],
        ["predict", "--data", rows],
        ["export"],
        ["generate"],
        ["chat"],
        ["extract", "--text", "x"],
    ):
        assert cli([command[0], str(run), *command[1:]]) == 2
        assert f"add --objective {TASK} to import it.\n" in capsys.readouterr().err
    assert cli(["predict", "nowhere", *NAMED, "--data", rows]) == 2
    assert "nowhere is not a run; remove --objective" in capsys.readouterr().err
    assert "sentence_order" not in sys.modules


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(0)", 1, "line 7, ended the command with SystemExit: 0; remove this call."),
        ("os._exit(0)", 1, "os._exit(0) was called in "),
        ("torch.set_grad_enabled(False)", 1, "step 1: the loss does not depend on any trained weight"),
        ("os.chdir('/'), torch.set_default_dtype(torch.float64)", 0, ""),
    ],
)
def test_its_loss_can_neither_end_the_command_nor_change_the_state_of_training(
    home: Path, tmp_path: Path, statement: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless.py").write_text(
        "import os, sys, torch\nfrom sentence_order import SentenceOrder\n\n\nclass Careless(SentenceOrder):\n"
        f"    def loss(self, batch):\n        {statement}\n        return super().loss(batch)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    changes = {"task": "careless:Careless", "training__max_steps": 2}
    line = ["train", *configured(home, **changes), "--output-dir", str(tmp_path / "run"), "--plain"]
    found, _, error = finish(line, home / "cache")
    assert found == code, error
    assert words in error
    assert (tmp_path / "run/final").exists() == (code == 0)


def test_what_it_cannot_do_is_refused(home: Path, run: Path) -> None:
    assert "cannot generate text" in refused(home, "generate", str(run), *NAMED)
    assert "remove --data" in refused(home, "eval", str(run), *NAMED, "--data", str(home / "stories.jsonl"))

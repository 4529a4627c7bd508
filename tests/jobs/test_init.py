"""`sansgpu init` writes configurations that load and train, with a comment for every key."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sansgpu.cli import run as cli
from sansgpu.config.load import commented_yaml
from sansgpu.tasks.configuration import as_config, load_config
from tests.processes import Captured, finish, messages, write_corpus, write_rows
from tests.tasks.folders import chat_rows, conll, labeled_rows, model_folder, preference_rows, prompt_rows, squad

YES = ["--yes", "--json"]
QUICK = ["--set", "training.compile=off", "--max-steps", "2"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _pairs(path: Path) -> Path:
    rows = [{"anchor": f"red {number}", "positive": f"warm red {number}"} for number in range(40)]
    return write_rows(path, rows)


KINDS: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "pretrain": (write_corpus, None),
    "sft": (chat_rows, "qwen2"),
    "classify": (labeled_rows, "bert"),
    "tokens": (conll, "bert"),
    "qa": (squad, "bert"),
    "embed": (_pairs, "bert"),
    "static": (_pairs, "bert"),
    "preference": (preference_rows, "qwen2"),
    "grpo": (prompt_rows, "qwen2"),
}
SUFFIXES = {"qa": ".json", "tokens": ".conll"}


OFTEN = ("pretrain", "classify")  # the other tasks are tested before a release


@pytest.mark.parametrize("task", [pytest.param(t, marks=() if t in OFTEN else pytest.mark.long) for t in KINDS])
def test_what_is_written_trains(task: str, tmp_path: Path, capsys: Captured) -> None:
    write, model = KINDS[task]
    text = write(tmp_path / f"rows{SUFFIXES.get(task, '.jsonl')}")
    base = ["--model", str(model_folder(model))] if model else []
    assert cli(["init", "a.yaml", "--text", str(text), "--task", task, *base, "--hours", "0.01", *YES]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["commands"] == ["sansgpu plan a.yaml", "sansgpu train a.yaml"]
    config, notes = load_config(Path("a.yaml"))
    assert notes == []
    assert (config.task, config.training.max_hours, config.data.dataset_name) == (task, 0.01, str(text))
    accumulation = 8 if task == "grpo" else 2  # completions of a prompt are in one step
    quick = [*QUICK, "--set", f"training.gradient_accumulation_steps={accumulation}"]
    assert cli(["train", "a.yaml", *quick, "--output-dir", "run"]) == 0, capsys.readouterr().err
    assert (tmp_path / "run/final").is_dir()


def test_every_key_has_a_comment(tmp_path: Path) -> None:
    assert cli(["init", "a.yaml", "--text", str(labeled_rows(tmp_path / "rows.jsonl")), "--task", "classify",
                "--model", str(model_folder("bert")), "--yes"]) == 0  # fmt: skip
    lines = Path("a.yaml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")]
    sections = yaml.safe_load("\n".join(lines))
    assert len(keys) == 1 + sum(1 + len(sections[name]) for name in ("model", "training", "data"))
    assert all(lines[n - 1].lstrip().startswith("#") for n in keys if not lines[n].endswith(":"))


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("rate", [2e-5, 1e-4, 0.01])
@pytest.mark.parametrize("task", ["sft", "classify", "static"])
def test_only_values_that_are_not_defaults_of_the_task_are_written(
    task: str, rate: float, adapter: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"training": {"learning_rate": rate, "batch_size": "auto", "beta2": 0.999}}
    if task != "static":
        given["model"] = {"name_or_path": "base", "adapter": adapter}
    config = as_config({"task": task, "data": {"dataset_name": "rows.jsonl"}, **given})
    (tmp_path / "a.yaml").write_text(written := commented_yaml(config, ""))
    assert load_config(tmp_path / "a.yaml")[0] == config
    assert "beta2" not in written, "it is the default of all three tasks"


def test_only_plan_says_how_much_of_the_text_is_read(capsys: Captured) -> None:
    assert cli(["init", "a.yaml", "--text", "python-stdlib", "--hours", "10m", "--yes"]) == 0
    head = [line for line in Path("a.yaml").read_text().splitlines() if line.startswith("# ")]
    assert "`sansgpu plan` measures how much of the data" in " ".join(line.removeprefix("# ") for line in head)
    assert " tokens" not in capsys.readouterr().out
    assert "  # maximum passes over the training split\n  num_epochs: 4" in Path("a.yaml").read_text()


@pytest.mark.long
def test_more_time_and_cores_give_a_larger_model(tmp_path: Path) -> None:
    """`init` assumes that the cores of another machine are as fast as those of this one."""
    widths = []
    for machine in (["--hours", "10m", "--cores", "1"], ["--hours", "100h", "--cores", "64", "--memory", "256GB"]):
        assert cli(["init", "a.yaml", "--text", "python-stdlib", "--force", "--yes", *machine]) == 0
        widths.append(load_config(Path("a.yaml"))[0].model.d_model)
    assert widths[0] < widths[1]
    assert cli(["init", "b.yaml", "--cores", "64", "--hours", "100h", "--memory", "1GB", "--yes"]) == 0
    assert load_config(Path("b.yaml"))[0].model.d_model < widths[1]


@pytest.mark.long
def test_short_texts_get_smaller_steps_and_more_weight_decay(tmp_path: Path) -> None:
    found = []
    for size in (200_000, 20_000_000):
        text = tmp_path / f"{size}.txt"
        text.write_text("A short text. " * (size // 14))
        assert cli(["init", "a.yaml", "--text", str(text), "--hours", "10m", "--force", "--yes"]) == 0
        training = load_config(Path("a.yaml"))[0].training
        found.append((training.gradient_accumulation_steps, -training.weight_decay))
    assert found[0][0] <= found[1][0]
    assert found[0][1] < found[1][1]


def test_a_file_is_replaced_only_on_request(capsys: Captured) -> None:
    Path("sansgpu.yaml").write_text("task: pretrain\n")
    assert cli(["init", "--yes"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert Path("sansgpu.yaml").read_text() == "task: pretrain\n"
    assert cli(["init", "--yes", "--force"]) == 0
    assert load_config(Path("sansgpu.yaml"))[0].data.dataset_name == "python-stdlib"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "missing.txt"], "missing.txt does not exist"),
        (["--task", "classify"], "task classify cannot learn from python-stdlib"),
        (["--task", "poetry"], "must be one of pretrain"),
        (["--hours", "soon"], "write hours or minutes"),
        (["--hours", "0"], "write hours or minutes"),
        (["--model", "folder"], "remove --model"),
        (["--memory", "much"], "write a size such as 8GB"),
        (["--memory", "100MB"], "not even the smallest model fits"),
        (["--cores", "0"], "--cores"),
        (["notes.txt"], "does not end in .yaml or .yml"),
        (["a.yaml/b.yaml"], "cannot be written"),
    ],
)
def test_bad_answers_are_refused(arguments: list[str], words: str, capsys: Captured) -> None:
    Path("a.yaml").write_text("")
    assert cli(["init", "--yes", *arguments]) == 2
    *_, message = messages(capsys.readouterr().err)  # after notes on the data
    assert words in message
    assert not Path("sansgpu.yaml").exists()


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, capsys: Captured) -> None:
    rows, model = chat_rows(tmp_path / "rows.jsonl"), str(model_folder("qwen2"))
    answers = ["--text", str(rows), "--task", "sft", "--model", model, "--memory", "100MB"]
    assert cli(["init", "--yes", *answers]) == 2
    assert "this model does not fit into 0.1 GB" in capsys.readouterr().err
    assert not Path("sansgpu.yaml").exists()


def test_without_a_terminal_every_answer_is_needed(home: Path) -> None:
    code, _, error = finish(["init", "--text", "python-stdlib", "--task", "pretrain"], home / "cache")
    assert code == 2
    assert "pass --cores, or --yes" in error


def test_answers_as_flags_need_no_terminal() -> None:
    answers = ["--text", "python-stdlib", "--task", "pretrain", "--hours", "1", "--cores", "2", "--memory", "8GB"]
    assert cli(["init", *answers]) == 0


def test_questions_are_asked_again_until_the_answers_are_good(tmp_path: Path) -> None:
    write_corpus(tmp_path / "notes.jsonl")
    keyboard, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "sansgpu", "init"], stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        os.write(keyboard, b"nothing.txt\nnotes.jsonl\npoetry\npretrain\nmany\n8\n32GB\nsoon\n30m\n")
        out, shown = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert "nothing.txt does not exist" in shown
    assert "poetry is not one of" in shown
    assert "Written to sansgpu.yaml" in out
    config, _ = load_config(Path("sansgpu.yaml"))
    assert (config.data.dataset_name, config.training.max_hours) == ("notes.jsonl", 0.5)


@pytest.mark.parametrize(
    ("text", "dataset", "subset"),
    [
        pytest.param("fineweb-edu", "karpathy/fineweb-edu-100b-shuffle", None, marks=pytest.mark.long),
        ("wikipedia-de", "wikimedia/wikipedia", "20231101.de"),
    ],
)
def test_a_corpus_on_the_hub_is_downloaded_as_far_as_needed(
    text: str, dataset: str, subset: str | None, capsys: Captured
) -> None:
    tokens = []
    for hours in ("10m", "40h"):
        assert cli(["init", "a.yaml", "--text", text, "--hours", hours, "--force", *YES]) == 0
        config, _ = load_config(Path("a.yaml"))
        assert (config.data.dataset_name, config.data.dataset_config) == (dataset, subset)
        assert config.data.streaming
        assert config.data.max_tokens is not None
        tokens.append((config.data.max_tokens, config.data.vocab_size))
    assert tokens[0] < tokens[1]
    assert tokens[0][1] < tokens[1][1]
    assert cli(["init", "b.yaml", "--text", text, "--task", "sft", *YES]) == 2
    assert f"task sft cannot learn from {text}" in capsys.readouterr().err

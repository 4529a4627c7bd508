"""`sansgpu generate --data` completes the rows of a file, skips bad ones, and resumes after it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sansgpu.cli import run as cli
from tests.processes import Captured, json_of, kill_when, messages, options, start, train, write_corpus, write_rows
from tests.tasks.folders import model_folder

pytestmark = pytest.mark.usefixtures("home")

WORDS = "red blue green fast slow old new warm"
ROWS: list[Any] = [
    {"prompt": f"{WORDS[:number]}?", "id": number} if number % 2 else
    {"messages": [{"role": "user", "content": WORDS[: number + 3]}], "id": number} if number % 4 else
    {"text": WORDS[: number + 2]}
    for number in range(1, 25)
]  # fmt: skip
OPTIONS = ("--max-new-tokens", "30", "--temperature", "1", "--seed", "5")


def generated(capsys: Captured, target: Path, data: Path, output: Path, *more: str) -> dict[str, Any]:
    return json_of(capsys, "generate", target, "--data", data, "--output", output, *OPTIONS, *more)


def test_rows_are_completed_in_order_and_task_sft_reads_them(tmp_path: Path, capsys: Captured) -> None:
    target, data, output = model_folder("qwen2"), write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    summary = generated(capsys, target, data, output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert (summary["rows"], summary["skipped"], summary["batch_size"]) == (len(ROWS), 0, len(ROWS))
    assert summary["tokens"] > 100
    assert summary["tokens_per_second"] > 0
    for before, after in zip(ROWS, rows, strict=True):
        assert after["finish_reason"] in ("stop", "length")
        assert after.get("id") == before.get("id")
        if "prompt" in before:
            assert after["prompt"] == before["prompt"]
            assert after["completion"]
        elif "messages" in before:
            assert after["messages"][:-1] == before["messages"]
            assert after["messages"][-1]["role"] == "assistant"
        else:
            assert after["text"] == before["text"] + after["completion"]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]
    small = tmp_path / "small.jsonl"
    assert generated(capsys, target, data, small, "--batch-size", "3")["batch_size"] == 3
    assert small.read_bytes() == output.read_bytes()
    chosen = options({"task": "sft", "model.name_or_path": target, "data.dataset_name": output,
                      "data.on_bad_row": "skip"})  # fmt: skip
    assert cli(["train", *chosen, "--dry-run", "--output-dir", str(tmp_path / "run")]) == 0


def test_a_killed_command_continues(tmp_path: Path, capsys: Captured) -> None:
    data, whole, output = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    target, partial = shutil.copytree(model_folder("qwen2"), tmp_path / "model"), tmp_path / "out.jsonl.partial"
    arguments = ["generate", str(target), "--data", str(data), "--output", str(output), *OPTIONS]
    process = start([*arguments, "--batch-size", "2"], tmp_path / "cache")
    kill_when(process, lambda: partial.exists() and partial.read_bytes().count(b"\n") > 3)
    assert not output.exists()
    done = partial.read_bytes()
    partial.write_bytes(done + b'{"prompt": "tor')  # a line that was being written
    assert cli([*arguments, "--seed", "6"]) == 2
    assert "started with a different model, data or options" in messages(capsys.readouterr().err)[0]
    weights = (target / "model.safetensors").read_bytes()
    middle = len(weights) // 2
    (target / "model.safetensors").write_bytes(weights[:middle] + b"\x01\x02\x03\x3d" + weights[middle + 4 :])
    assert cli(arguments) == 2
    assert f"the weights of {target} have changed since {partial} was started" in messages(capsys.readouterr().err)[0]
    (target / "model.safetensors").write_bytes(weights)
    assert generated(capsys, target, data, output)["resumed"] == done.count(b"\n")
    generated(capsys, target, data, whole)
    assert output.read_bytes() == whole.read_bytes()
    assert whole.read_bytes().startswith(done)
    assert cli(arguments) == 2
    assert "already exists" in messages(capsys.readouterr().err)[0]


def test_somebody_elses_partial_file_is_not_deleted(tmp_path: Path, capsys: Captured) -> None:
    data, theirs = write_rows(tmp_path / "rows.jsonl", ROWS[:1]), tmp_path / "out.jsonl.partial"
    theirs.write_text("mine")
    arguments = ["generate", str(model_folder("qwen2")), "--data", str(data), "--output", str(tmp_path / "out.jsonl")]
    assert cli(arguments) == 2
    assert f"{theirs} already exists; choose another --output" in messages(capsys.readouterr().err)[0]
    assert theirs.read_text() == "mine"


def test_runs_complete_texts_and_skip_bad_rows(tmp_path: Path, capsys: Captured) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    assert train(tmp_path, tmp_path / "run", "--max-steps", "2") == 0
    bad = [
        {"prompt": " "},
        {"other": 1},
        [1],
        "{",
        {"messages": []},
        {"messages": "x"},
        {"text": 3},
        {"prompt": "\ud800"},
    ]
    bad += [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}]
    bad += [{"messages": [{"role": "user", "content": "no template"}]}, {"prompt": "a b c " * 4000}]
    data = write_rows(tmp_path / "rows.jsonl", [*bad, {"text": "The"}, {"prompt": "A run"}])
    summary = generated(capsys, tmp_path / "run", data, tmp_path / "out.jsonl")
    assert (summary["rows"], summary["skipped"]) == (2, len(bad))
    lines = tmp_path / "lines.txt"
    lines.write_text("The first\nThe second\n")
    assert generated(capsys, tmp_path / "run", lines, tmp_path / "lines.jsonl")["rows"] == 2
    write_rows(data, bad)
    for arguments, words in (
        (["--data", str(data), "--output", str(tmp_path / "none.jsonl")], "has no rows to complete"),
        (["--data", str(data)], "--data requires --output"),
        (["--data", str(lines), "--output", str(tmp_path)], "is a folder"),
        (["--data", str(lines), "--output", str(tmp_path / "x"), "--batch-size", "0"], "--batch-size is 0"),
        (["--prompt", "x", "--json"], "require --data"),
    ):
        capsys.readouterr()
        assert cli(["generate", str(tmp_path / "run"), *arguments]) == 2
        (line,) = messages(capsys.readouterr().err)
        assert words in line


@pytest.mark.long
def test_in_a_terminal_the_result_follows_the_progress(tmp_path: Path) -> None:
    """Progress is shown only after one second, so prompts are completed one by one to take longer."""
    data = write_rows(tmp_path / "rows.jsonl", ROWS * 3)
    command = [sys.executable, "-m", "sansgpu", "generate", str(model_folder("qwen2")), "--data", str(data)]
    command += ["--output", "out.jsonl", "--batch-size", "1", "--max-new-tokens", "150"]
    main, other = pty.openpty()
    with subprocess.Popen(command, cwd=tmp_path, stdout=other, stderr=other, env={**os.environ, "TERM": "xterm"}):
        os.close(other)
        printed = b""
        with contextlib.suppress(OSError):  # raised once the program has closed the terminal
            while piece := os.read(main, 1 << 16):
                printed += piece
    os.close(main)
    assert b"generating" in printed
    assert printed.rpartition(b"\x1b[2K")[2].startswith(b"out.jsonl: 72 rows, ")

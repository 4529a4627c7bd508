"""Control characters in names and texts never reach the terminal."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tools.tiny_model import make_folder

from sansgpu.cli import run as cli
from sansgpu.events.escape import printable, printable_json, printable_line
from tests.processes import Captured, environment, events_of, settings, write_corpus, write_rows

pytestmark = pytest.mark.usefixtures("home")

EVIL = "a\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\x7fz"
WRITTEN = r"a\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\x7fz"
SHORT = {"training__max_steps": 2, "training__eval_steps": 2, "training__save_steps": 2}


def controls(text: str) -> list[str]:
    return [letter for letter in text if printable(letter) != letter and letter != "\r"]


def fill(home: Path) -> None:
    (home / EVIL).mkdir()
    write_corpus(home / EVIL / f"{EVIL}.jsonl")


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    """Trains a run whose folder and data file have control characters in their names."""
    target = home / EVIL / "run"
    data = f"data.dataset_name={home / EVIL / (EVIL + '.jsonl')}"
    assert cli(["train", *settings(**SHORT), "--set", data, "--output-dir", str(target)]) == 0
    events = events_of(target)
    for event in events:
        if event["event"] == "eval":
            event["sample"] = EVIL
    warning = {"event": "warning", "message": f"{EVIL}<script>alert(1)</script>", "step": 1, "cause": "gradient"}
    write_rows(target / "metrics.jsonl", [*events, warning])
    return target


def test_what_is_written_out_and_what_stays() -> None:
    assert printable(EVIL) == WRITTEN
    assert printable("\r\na\tb\rc\0") == "\r\na\tb\\x0dc\\x00"
    assert printable_line("a\r\nb\u2028c") == r"a\x0d\x0ab\u2028c"
    kept = "né 漢字\u3000\xa0می\u200cخواهم 👩\u200d🚀 \ufffd"
    assert printable(kept) == printable_line(kept) == kept
    assert printable(os.fsdecode(b"\xff")) == r"\udcff"
    line = json.dumps({EVIL: [EVIL, "\x85"]}, ensure_ascii=False)
    assert controls(printable_json(line)) == []
    assert json.loads(printable_json(line)) == json.loads(line)


def test_errors_and_warnings_of_any_name(home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    broken = home / f"{EVIL}.yaml"
    broken.write_text(json.dumps({EVIL: 1, "training": {EVIL: 2, "optimizer": EVIL}}))
    lone = os.fsdecode(b"lone\xff\nline")
    for command in (
        ["train", EVIL],
        ["train", lone],
        ["train", str(broken)],
        ["train", "--set", EVIL],
        ["train", "--set", f"data.dataset_name=./{EVIL}/none"],
        ["train", f"--{EVIL}"],
        [EVIL],
        ["plan", "--set", f"model.{EVIL}=1"],
        ["generate", f"./{EVIL}/none"],
        ["generate", f"./{EVIL}"],
        ["report", EVIL],
        ["snapshots", "list", EVIL],
        ["tokenizer", "encode", f"./{EVIL}", "--text", "x"],
        ["--debug", "generate", f"./{EVIL}"],
    ):
        capsys.readouterr()
        assert cli(command) == 2, command
        captured = capsys.readouterr()
        assert controls(captured.out + captured.err) == [], command
        if "--debug" not in command:
            loading = "loading PyTorch ..."  # printed if importing it takes long
            said = [line for line in captured.err.splitlines() if line != loading]
            assert len(said) == 1, command


def test_every_command_that_shows_a_run(run: Path, home: Path, tmp_path: Path, capsys: Captured) -> None:
    capsys.readouterr()
    torn = shutil.copytree(run, tmp_path / f"{EVIL}-torn")
    (torn / "config.yaml").write_text(yaml.safe_dump({EVIL: EVIL}))
    for command in (
        ["runs", str(home)],
        ["runs", str(home), "--json"],
        ["runs", str(tmp_path)],
        ["report", str(run), "--output", str(tmp_path / f"{EVIL}.html")],
        ["snapshots", "list", str(run)],
        ["snapshots", "show", str(run)],
        ["snapshots", "verify", str(run)],
        ["snapshots", "fork", str(run), "--output-dir", str(tmp_path / f"{EVIL}-fork")],
        ["eval", str(run)],
        ["export", str(run), "--output", str(tmp_path / f"{EVIL}-out")],
        ["generate", str(run), "--prompt", EVIL, "--max-new-tokens", "40", "--temperature", "3"],
        ["train", "--resume", "--output-dir", str(run), "--max-steps", "3"],
        ["train", "--resume", "--output-dir", str(run), "--max-steps", "4", "--headless"],
        ["train", "--resume", "--output-dir", str(run), "--dry-run"],
    ):
        assert cli(command) == 0, command
        captured = capsys.readouterr()
        assert controls(captured.out + captured.err) == [], command
        assert captured.out, command
    page = (tmp_path / f"{EVIL}.html").read_text()
    assert "<script>alert(1)" not in page


def test_markup_in_a_name_is_text(home: Path, capsys: Captured) -> None:
    (home / "[").mkdir()
    named = write_corpus(home / "[/red][bold]:smile:.jsonl")
    folder = home / "[/red]"
    assert cli(["train", *settings(**SHORT), "--set", f"data.dataset_name={named}", "--output-dir", str(folder)]) == 0
    assert cli(["runs", str(folder)]) == 0
    assert "[/red]" in capsys.readouterr().out


def test_a_model_that_writes_escape_sequences_moves_no_cursor(tmp_path: Path, capsys: Captured) -> None:
    """An untrained model samples all tokens, including the bytes of control characters."""
    model = str(make_folder(tmp_path / "model", "qwen2"))
    options = ["--max-new-tokens", "96", "--temperature", "1.5", "--seed", "3"]
    for command in (["generate", model, "--prompt", "r\x1b[2J", *options], ["chat", model, "--prompt", "r", *options]):
        capsys.readouterr()
        assert cli(command) == 0
        said = capsys.readouterr().out
        assert controls(said) == []
        assert r"\x" in said, said


@pytest.mark.long
def test_the_live_view_and_the_bars_in_a_real_terminal(home: Path, run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sansgpu", "train", *settings(**SHORT, training__sample_tokens=4)]
    command += ["--set", f"data.dataset_name={home / EVIL / (EVIL + '.jsonl')}"]
    command += ["--output-dir", str(tmp_path / EVIL)]
    main, other = pty.openpty()
    process = subprocess.Popen(
        command, stdout=other, stderr=other, stdin=other, env={**environment(tmp_path / "cache"), "TERM": "xterm"}
    )
    os.close(other)
    seen = b""
    while True:
        try:
            seen += os.read(main, 1 << 16)
        except OSError:  # the process has closed the terminal
            break
    assert process.wait(timeout=60) == 0, seen
    for part in (b"\x1b[2J\x1b]0;", b"\x1b]0;owned", b"\x07", b"\xc2\x9b", "\u202e".encode()):
        assert part not in seen
    assert b"owned" in seen

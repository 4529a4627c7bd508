"""Runs the command line in this process, in a fork or in a new process; a test may kill the latter two."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tools.outcome import file_digests
from tools.outcome import json_lines as json_lines
from tools.outcome import record as record

from sansgpu.cli import run as cli
from tests.forks import Fork, ForkServer

# A model that trains in about a second, with dropout. It logs, evaluates and saves a snapshot every few steps.
TINY = {
    "model.d_model": 32,
    "model.n_heads": 2,
    "model.n_layers": 2,
    "model.d_ff": 48,
    "model.max_seq_len": 32,
    "model.dropout": 0.1,
    "data.vocab_size": 300,
    "data.validation_split": 0.05,
    "training.batch_size": 2,
    "training.gradient_accumulation_steps": 2,
    "training.warmup_steps": 2,
    "training.optimizer": "muon",
    "training.logging_steps": 2,
    "training.save_steps": 4,
    "training.eval_steps": 3,
    "training.report_to": "none",
    "training.sample_tokens": 0,
    "training.precision": "fp32",
    "training.threads": 1,
    "training.compile": "off",
    "device": "cpu",
}


SURROUNDINGS = dict(os.environ)  # before tests change the environment
TEMPORARY = Path(tempfile.gettempdir())
# Progress on stderr, which is neither an error nor a warning: certain stages, and any text before " ...".
PROGRESS = re.compile(
    r"tokenizing|training the tokenizer|reading|measuring|timing|Writing model shards|libgomp: "
    r"|(?!sansgpu: ).* \.\.\.( |$)"
)
Process = subprocess.Popen[str] | Fork
Captured = pytest.CaptureFixture[str]
WORDS = "the model learns a word from every page it reads and then forgets where it stood"


def write_corpus(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """Writes random documents as JSONL; equal seeds give equal documents."""
    words = WORDS.split()
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            text = " ".join(draw.choice(words) for _ in range(draw.randint(5, 120)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Writes each row as a line of JSON; strings are written unchanged."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def overrides(*layers: Mapping[str, object]) -> list[str]:
    """Merges settings into `key=value`. Later layers win, `model__d_ff` means `model.d_ff`, and "" removes a key."""
    merged = {key.replace("__", "."): value for layer in layers for key, value in layer.items()}
    return [f"{key}={value}" for key, value in merged.items() if value != ""]


def as_options(changes: Iterable[str]) -> list[str]:
    """Returns overrides as --set arguments."""
    return [part for change in changes for part in ("--set", change)]


def options(*layers: Mapping[str, object]) -> list[str]:
    """Merges settings as `overrides` does, into --set arguments."""
    return as_options(overrides(*layers))


def settings(**changes: object) -> list[str]:
    """Returns TINY with changes as --set arguments."""
    return options(TINY, changes)


def train(home: Path, run: Path, *more: str, **changes: object) -> int:
    """Trains a tiny model on the corpus in `home`, in this process; returns the exit code."""
    chosen = {"data__dataset_name": home / "corpus.jsonl", **changes}
    return cli(["train", *settings(**chosen), "--output-dir", str(run), *more])


def train_once(run: Path, arguments: list[str]) -> Path:
    """Trains a run in this process unless its folder exists."""
    if not run.exists():
        assert cli(["train", *arguments, "--output-dir", str(run)]) == 0
    return run


def events_of(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Returns the events of a run, or only those of these kinds."""
    return [event for event in json_lines(run / "metrics.jsonl") if not kinds or event["event"] in kinds]


def environment(cache: Path) -> dict[str, str]:
    """Returns environment variables with `cache` as the cache folder."""
    cache.mkdir(parents=True, exist_ok=True)
    return {**os.environ, "SANSGPU_CACHE": str(cache)}


def use_cache(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Makes `cache` the cache folder of this process and its children."""
    patch.setenv("SANSGPU_CACHE", environment(cache)["SANSGPU_CACHE"])


@cache
def fork_server() -> ForkServer:
    """Returns the fork server that all pytest workers share; a fork of a worker itself would lack its threads.

    Commands run offline, because the Hub may be unreachable.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid4().hex)[:12]
    return ForkServer(TEMPORARY / f"sansgpu-forks-{run}", SURROUNDINGS | {"HF_HUB_OFFLINE": "1"})


def start(arguments: list[str], cache: Path, **variables: str) -> Fork:
    """Starts `sansgpu ARGUMENTS` in a fork."""
    return fork_server().start(arguments, environment(cache) | variables)


def finish(arguments: list[str], cache: Path, **variables: str) -> tuple[int, str, str]:
    """Runs `sansgpu ARGUMENTS` in a fork; returns its exit code, stdout and stderr."""
    return ended(start(arguments, cache, **variables))


def start_apart(arguments: list[str], cache: Path) -> subprocess.Popen[str]:
    """Starts `sansgpu ARGUMENTS` in a new process, which takes seconds longer than a fork."""
    return subprocess.Popen(
        [sys.executable, "-m", "sansgpu", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(cache),
    )


def finish_apart(arguments: list[str], cache: Path) -> tuple[int, str, str]:
    """Runs `sansgpu ARGUMENTS` in a new process; returns its exit code, stdout and stderr."""
    return ended(start_apart(arguments, cache))


def ended(process: Process) -> tuple[int, str, str]:
    """Waits for a process; returns its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=240)
    assert process.returncode is not None
    return process.returncode, out, err


def messages(error: str) -> list[str]:
    """Returns the lines of stderr without warnings and progress."""
    return [line for line in error.splitlines() if not (line.startswith("warning: ") or PROGRESS.match(line))]


def sentence(capsys: Captured) -> str:
    """Returns the only line of stderr apart from progress and warnings."""
    captured = capsys.readouterr()
    lines = messages(captured.err)
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("sansgpu: ")
    assert "Traceback" not in captured.err + captured.out
    return lines[0]


def printed(capsys: Captured, *arguments: object) -> str:
    """Runs a command in this process that must succeed; returns its stdout."""
    capsys.readouterr()
    assert cli([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def json_of(capsys: Captured, *arguments: object) -> dict[str, Any]:
    """Runs a command with --json in this process; returns the object that it prints."""
    values: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json"))
    return values


def refused(capsys: Captured, *arguments: object) -> str:
    """Runs a command in this process that must exit with code 2; returns its error message."""
    capsys.readouterr()
    assert cli([str(argument) for argument in arguments]) == 2
    return sentence(capsys)


def kill_when(process: Process, ready: Callable[[], bool], number: int = signal.SIGKILL) -> int | None:
    """Sends a signal once `ready` returns True; returns the exit code."""
    deadline = time.monotonic() + 120
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(number)
    process.communicate(timeout=120)
    return process.returncode


def digests(run: Path) -> dict[str, str]:
    """Returns the SHA-256 of every safetensors file of a run."""
    return file_digests(run, "*.safetensors")

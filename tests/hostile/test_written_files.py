"""Commands that write files never change files that sansgpu did not write."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sansgpu
from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from tests.processes import sentence, settings, write_corpus

pytestmark = pytest.mark.usefixtures("home")

CONFIG = Path(__file__).parents[2] / "configs/cpu_small.yaml"
SPACE = "training.learning_rate: [0.001, 0.01]\n"
SLOW_PICTURES = pytest.param("report png", marks=pytest.mark.long)
FOLDER, FILE = "folder", "file"  # the kind of a command's output

# A user's files, many of them with names that exports, runs, benchmarks or manifests use.
SOMEBODYS = {
    "thesis.tex": "years of work", "src/main.py": "print()", "config.json": "{}", "README.md": "# Mine",
    "config.yaml": "mine: 1", "environment.json": "{}", "metrics.jsonl": '{"event": "start"}\n', "report.html": "<p>",
    "report.md": "mine", "report.csv": "1,2", "start.sh": "rm", "optimized.yaml": "a: 1", "best.yaml": "b: 2",
    "Dockerfile": "FROM me", "pytorchjob.yaml": "c: 3", "tokenizer.json": "{}", "tokenizer/tokenizer.json": "{}",
    "final/model.safetensors": "mine", "final/config.json": "{}", "model.safetensors": "mine", ".lock": "mine",
    ".writable": "mine", ".step-by-step/notes": "1", "step-000001/notes.md": "mine", "tune.json": "{}", "loss.png": "p",
    ".report.html.partial": "mine", "events.out": "mine", "trials/0001/final/a": "mine", "snapshots/notes": "mine",
}  # fmt: skip


def fill(home: Path) -> None:
    """Trains two small runs, `one` and `other`."""
    write_corpus(home / "corpus.jsonl")
    (home / "space.yaml").write_text(SPACE)
    for name in ("one", "other"):
        assert cli(train(home, home / name)) == 0


def train(home: Path, output: Path | str, *more: str, steps: int = 4, **changes: object) -> list[str]:
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=steps, **changes)
    return ["train", *chosen, "--output-dir", str(output), *more]


def resume(output: Path, *more: str) -> list[str]:
    return ["train", "--resume", "--output-dir", str(output), *more]


def cluster(output: str) -> list[str]:
    options = {"nodes": "1", "cpus": "4", "memory": "8Gi", "pvc": "corpus", "image": "registry.example/sansgpu:1"}
    pairs = [part for name, value in options.items() for part in (f"--{name}", value)]
    return ["k8s", str(CONFIG), *pairs, "--output-dir", output]


Command = Callable[[Path, Path, str], list[str]]  # from home, an unused folder and the output to try
COMMANDS: dict[str, tuple[str, Command]] = {
    "train": (FOLDER, lambda home, free, out: train(home, out)),
    "train --resume": (FOLDER, lambda home, free, out: train(home, out, "--resume", "latest")),
    "train --dry-run": (FOLDER, lambda home, free, out: train(home, out, "--dry-run")),
    "checkpoint_dir": (FOLDER, lambda home, free, out: train(home, free, training__checkpoint_dir=out)),
    "logging_dir": (FOLDER, lambda home, free, out: train(home, free, training__logging_dir=out)),
    "tune": (FOLDER, lambda home, free, out: [
        "tune", *settings(data__dataset_name=home / "corpus.jsonl"), "--trials", "1", "--space",
        str(home / "space.yaml"), "--output-dir", out]),
    "bench": (FOLDER, lambda home, free, out: [
        "bench", *settings(data__dataset_name=home / "corpus.jsonl"), "--output-dir", out]),
    "k8s": (FOLDER, lambda home, free, out: cluster(out)),
    "slurm": (FOLDER, lambda home, free, out: ["slurm", str(CONFIG), "--nodes", "1", "--output-dir", out]),
    "export": (FOLDER, lambda home, free, out: ["export", str(home / "one"), "--output", out]),
    "export gguf": (FILE, lambda home, free, out: ["export", str(home / "one"), "--format", "gguf", "--output", out]),
    "report": (FILE, lambda home, free, out: ["report", str(home / "one"), "--output", out]),
    "report png": (FOLDER, lambda home, free, out: ["report", str(home / "one"), "--format", "png", "--output", out]),
    "fork": (FOLDER, lambda home, free, out: ["snapshots", "fork", str(home / "one"), "--output-dir", out]),
    "tokenizer": (FOLDER, lambda home, free, out: [
        "tokenizer", "train", str(home / "corpus.jsonl"), "--vocab-size", "300", "--output", out]),
    "plan": (FILE, lambda home, free, out: [
        "plan", "--hours", "0.1", "--data", str(home / "corpus.jsonl"), "--output", out]),
    "init": (FILE, lambda home, free, out: ["init", out, "--text", str(home / "corpus.jsonl"), "--yes"]),
    "extract": (FILE, lambda home, free, out: ["extract", str(home / "one"), "--text", "x", "--output", out]),
}  # fmt: skip
LINKS = {"link": "full", "link to empty": "empty", "link to file": "thesis.tex", "dangling": "new"}
TARGETS = ("full", ".", "..", "", *LINKS, "thesis.tex", "config.json", "pipe")


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Returns the kind, mode and content of everything below a folder."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status, name = path.lstat(), str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = "link", os.readlink(path)
        elif path.is_file():
            found[name] = "file", status.st_mode, hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = stat.S_IFMT(status.st_mode), status.st_mode
    return found


def write_somebodys(folder: Path) -> None:
    for name, text in SOMEBODYS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a folder with a user's files and links, both in place of the outputs and next to them."""
    project = tmp_path / "project"
    for folder in (project / "inside", project / "inside/full"):
        write_somebodys(folder)
    (project / "thesis.tex").write_text("mine")
    (project / "inside/full.partial").mkdir()
    here = project / "inside"
    (here / "empty").mkdir()
    os.mkfifo(here / "pipe")
    for name, target in LINKS.items():
        (here / name).symlink_to(target)
    monkeypatch.chdir(here)
    return project


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_touches_somebody_elses_files(
    command: str, home: Path, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state(project)
    for target in TARGETS:
        if target or not command.endswith("_dir"):  # an empty value leaves the key unset
            code = cli(COMMANDS[command][1](home, tmp_path / "free", target))
            said = sentence(capsys)
            assert code == 2, said
            assert state(project) == before, target


@pytest.mark.parametrize("target", ["full", ".", "", "link", "dangling", "thesis.tex"])
def test_training_from_python_changes_no_foreign_files(target: str, home: Path, project: Path) -> None:
    before = state(project)
    with pytest.raises(ConfigError):
        sansgpu.fit({"data": {"dataset_name": str(home / "corpus.jsonl")}}, target, quiet=True)
    assert state(project) == before


@pytest.mark.parametrize("command", ["train", "export", "fork", "tokenizer", "k8s", SLOW_PICTURES])
@pytest.mark.parametrize("target", ["new/and deep", "."])
def test_new_and_empty_folders_are_written(
    command: str, target: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert cli(COMMANDS[command][1](home, tmp_path / "free", target)) == 0
    written = state(here)
    assert len(written) > 2
    assert not [name for name in written if name.rpartition("/")[2].startswith(".sansgpu-")]


@pytest.mark.parametrize("command", ["export", "k8s", SLOW_PICTURES, "export gguf"])
def test_a_command_writes_again_what_it_wrote_and_keeps_what_was_added(
    command: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = COMMANDS[command][0] == FOLDER
    output = tmp_path / "output"
    arguments = COMMANDS[command][1](home, tmp_path / "free", str(output))
    assert cli(arguments) == 0
    first = state(tmp_path)
    assert cli(arguments) == 0
    assert state(tmp_path).keys() == first.keys()
    if not folder:
        return
    for name in ("notes.txt", "more/notes.txt"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("mine")
    (output / "linked").symlink_to(home / "corpus.jsonl")
    neighbors = [tmp_path / "output.partial", tmp_path / ".output.partial"]
    for neighbor in neighbors:
        write_somebodys(neighbor)
    before = state(tmp_path)
    assert cli(arguments) == 0
    after = state(tmp_path)
    assert after.keys() == before.keys()
    for name, known in before.items():
        if ".partial" in name or "notes" in name or "linked" in name:
            assert after[name] == known
    capsys.readouterr()

    others = ("README.md", "notes.txt", "linked", "more")
    changed = max(path for path in output.iterdir() if path.name not in others)
    changed.write_bytes(b"edited by hand")
    assert cli(arguments) == 2
    assert f"{changed} was not written by sansgpu or has changed" in sentence(capsys)
    assert changed.read_bytes() == b"edited by hand"


def test_notes_in_a_run_survive_everything(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli(train(home, run, training__keep_last=1)) == 0
    assert cli(["export", str(run)]) == 0
    places = ("", "snapshots", "snapshots/step-000004", "tokenizer", "final", "export", "final/more")
    notes = [run / place / name for place in places for name in ("notes.md", ".hidden", "export.partial/notes")]
    notes += [run / "README.md", run / "final/README.md", run / "final.partial/notes", run / "export.partial/notes"]
    for path in notes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {path}")
    weights = (run / "final/model.safetensors").read_bytes()
    assert cli(resume(run, "--max-steps", "8")) == 0
    assert "final/README.md was edited, so it is kept" in capsys.readouterr().out
    for command in (["export", str(run)], ["report", str(run)], ["snapshots", "prune", str(run)], ["eval", str(run)]):
        assert cli(command) == 0
    assert (run / "final/model.safetensors").read_bytes() != weights
    assert not (run / "snapshots/step-000004").exists()  # pruned; its notes are in the folder next to it
    for path in notes:
        text = f"mine: {path}"
        if path.parts[len(run.parts) :][:2] == ("snapshots", "step-000004"):
            path = run / "snapshots/step-000004.notes" / path.relative_to(run / "snapshots/step-000004")
        assert path.read_text() == text


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "environment.json", "metrics.jsonl", "report.html", ".lock", "snapshots", "final", "tokenizer"],
)
def test_links_in_a_run_are_not_followed(
    name: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    shutil.copytree(home / "one", run)
    if (run / name).exists():
        (run / name).rename(theirs)
    else:
        theirs.write_text("mine")
    (run / name).symlink_to(theirs)
    before = state(tmp_path)
    assert cli(resume(run, "--max-steps", "8")) == 2
    assert f"{run / name} is a symlink" in sentence(capsys)
    cli(["runs", str(tmp_path)])
    cli(["eval", str(run)])
    after = state(tmp_path)
    assert {key: value for key, value in after.items() if key in before} == before


def test_only_the_run_that_is_meant_is_written(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    checkpoints, logs = tmp_path / "checkpoints", tmp_path / "logs"
    elsewhere = {"training__checkpoint_dir": checkpoints, "training__logging_dir": logs}
    assert cli(train(home, one, training__report_to="tensorboard", **elsewhere)) == 0
    assert cli(train(home, other)) == 0
    capsys.readouterr()
    before = state(tmp_path)
    for arguments, words in {
        "export": (["export", str(one), "--output", str(other / "final")], "belongs to the run"),
        "fork": (["snapshots", "fork", str(one), "--output-dir", str(other)], "already contains a run"),
        "bench": (["bench", "--output-dir", str(one)], "contains a run, not a benchmark"),
        "export over": (["export", str(one), "--output", str(other)], "contains a run, not a model"),
        "checkpoints": (
            resume(other, "--set", f"training.checkpoint_dir={checkpoints}"),
            "contains another run's snapshots",
        ),
        "logs": (resume(other, "--set", f"training.logging_dir={logs}"), "contains another run's logs"),
        "new": (train(home, tmp_path / "new", training__logging_dir=logs), "contains another run's logs"),
    }.values():
        assert cli(arguments) == 2
        assert words in sentence(capsys)
    assert {name: known for name, known in state(tmp_path).items() if name in before} == before
    moved = one.rename(tmp_path / "moved")  # it is the same run
    assert cli(resume(moved, "--max-steps", "6")) == 0
    forked = tmp_path / "fork"
    assert cli(["snapshots", "fork", str(moved), "--output-dir", str(forked)]) == 0
    kept = state(checkpoints)
    assert cli(resume(forked, "--max-steps", "8")) == 0
    assert state(checkpoints) == kept


def test_a_hostile_mark_does_not_delete_files_outside(home: Path, tmp_path: Path) -> None:
    output, theirs = tmp_path / "output", tmp_path / "theirs"
    arguments = ["export", str(home / "one"), "--output", str(output)]
    assert cli(arguments) == 0
    (theirs / "a").mkdir(parents=True)
    known = json.loads((output / ".sansgpu.json").read_text())
    (theirs / "a/config.json").write_bytes((output / "config.json").read_bytes())
    (output / "linked").symlink_to(theirs)
    before = state(theirs)
    prints = known["files"]["config.json"]
    for names in ({"linked/a/config.json": prints}, {"../theirs/a/config.json": prints}):
        (output / ".sansgpu.json").write_text(json.dumps({**known, "files": {**known["files"], **names}}))
        cli(arguments)
        assert state(theirs) == before


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("mask", [0o027, 0o002])
def test_files_follow_the_umask(mask: int, home: Path, tmp_path: Path) -> None:
    os.umask(mask)
    run = tmp_path / "run"
    assert cli(train(home, run)) == 0
    for form in ("hf", "gguf"):
        assert cli(["export", str(run), "--format", form]) == 0
    assert cli(cluster(str(tmp_path / "k8s"))) == 0
    found = list(tmp_path.rglob("*"))
    assert {run / "final/model.safetensors", run / "snapshots/step-000004/model.safetensors"} <= {*found}
    for path in found:
        asked = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == asked & ~mask, path


POLL = """
import os, sys
missing = seen = 0
print("ready", flush=True)
while os.path.lexists(sys.argv[2]):
    seen += 1
    missing += not os.path.exists(sys.argv[1])
print(missing, seen, flush=True)
"""


def test_a_model_is_never_absent_while_it_is_replaced(home: Path, tmp_path: Path) -> None:
    output, going = tmp_path / "model", tmp_path / "going"
    arguments = ["export", str(home / "one"), "--output", str(output)]
    assert cli(arguments) == 0
    going.touch()
    command = [sys.executable, "-c", POLL, str(output / "model.safetensors"), str(going)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(6):
        assert cli(arguments) == 0
    going.unlink()
    missing, seen = map(int, process.communicate(timeout=60)[0].split())
    assert seen > 100
    assert missing == 0

"""Invalid files in a run's folder cause one warning or one error, and are never deleted."""

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sansgpu.cli import run as cli
from tests.hostile.fuzz.values import ODD, changed, dumped, places
from tests.views.runs import train

Values = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "run")


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def snapshot_file(run: Path, name: str) -> Path:
    return max((run / "snapshots").iterdir()) / name


def edit(file: Path, change: Callable[[Values], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(dumped(values))


def edit_line(run: Path, number: int, change: Callable[[Values], object]) -> None:
    """Changes line `number` of metrics.jsonl, counted from 1."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")
    values = json.loads(lines[number - 1])
    change(values)
    lines[number - 1] = dumped(values)
    file.write_text("\n".join(lines))


def line_of(run: Path, kind: str) -> int:
    """Returns the number of the first line with an event of this kind."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]
    return 1 + next(number for number, event in enumerate(events) if event["event"] == kind)


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        ("step", "loss", "low", 'loss is "low", but must be a valid number'),
        ("step", "loss", float("nan"), "invalid JSON"),
        ("step", "loss", 10**400, "loss is 1000"),
        ("step", "tokens", [1], "tokens is [1], but must be a valid integer"),
        ("step", "step", -1, "step is -1"),
        ("step", "system", {"core_percent": ["busy"]}, "system.core_percent.0 is"),
        ("step", "phase_seconds", {"data": {}}, "phase_seconds.data is {}"),
        ("step", "accuracy", 10**400, "accuracy is 1000"),
        ("eval", "loss", {"a": 1}, 'loss is {"a": 1}'),
        ("eval", "sample", "\ud800", "invalid JSON"),
        ("eval", "event", None, "event is null"),
        ("start", "parameters", "many", 'parameters is "many"'),
        ("end", "reason", 3, "reason is 3"),
        ("snapshot", "path", None, "path is null"),
    ],
)
def test_a_line_of_the_record_that_cannot_be_used_is_named_once_and_left_out(
    run: Path, kind: str, field: str, value: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    number = line_of(run, kind)
    edit_line(run, number, lambda event: event.update({field: value}))
    before = (run / "metrics.jsonl").read_bytes()
    assert cli(["report", str(run)]) == 0
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"line {number} is ignored: " in warning
    assert words in warning
    assert len(warning) < 600
    assert cli(["runs", str(run), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["state"] != "broken"
    assert f"line {number} is ignored" in row["problem"]
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_broken_line_hides_nothing_that_follows_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli(["runs", str(run), "--json"])
    (whole,) = json.loads(capsys.readouterr().out)["runs"]
    number = line_of(run, "snapshot")
    edit_line(run, number, lambda event: event.update(step="x"))
    edit_line(run, number + 1, lambda event: event.clear())
    cli(["runs", str(run), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert "and 1 more line" in found["problem"]
    assert found["state"] == whole["state"] == "done"
    assert found["step"] == whole["step"]


def test_texts_with_other_line_separators_are_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = line_of(run, "eval")
    lines = (run / "metrics.jsonl").read_text().split("\n")
    lines[number - 1] = json.dumps(
        {**json.loads(lines[number - 1]), "sample": "1\u20282\u20293\x85"}, ensure_ascii=False
    )
    (run / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert cli(["report", str(run)]) == 0
    assert cli(["runs", str(run), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert '"state": "done"' in captured.out


def test_a_resumed_run_keeps_the_lines_that_nobody_can_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = line_of(run, "step")
    edit_line(run, number, lambda event: event.update(loss="low"))
    broken = (run / "metrics.jsonl").read_text().split("\n")[number - 1]
    assert cli(["train", "--resume", "latest", "--output-dir", str(run), "--max-steps", "10"]) == 0
    lines = (run / "metrics.jsonl").read_text().split("\n")
    assert lines[number - 1] == broken
    assert json.loads(lines[-2])["event"] == "end"
    assert f"line {number} is ignored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("environment.json", lambda v: v.update(cores="two"), 'cores is "two"'),
        ("environment.json", lambda v: v.update(packages=[1]), "packages is [1]"),
        ("environment.json", lambda v: v.update(world_size=10**400), "64 bits"),
        ("config.yaml", lambda v: v.update(model=5), "model is 5"),
        ("config.yaml", lambda v: v["data"].update(dataset_name=[1]), "data.dataset_name is [1]"),
        ("config.yaml", lambda v: v["training"].update(eval_batches="few"), "training.eval_batches"),
    ],
)
def test_other_files_of_a_run_are_refused_by_name_and_field(
    run: Path, name: str, change: Callable[[Values], object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / name
    if name == "config.yaml":
        file.write_text(json.dumps(yaml.safe_load(file.read_text())))  # JSON is valid YAML
    edit(file, change)
    assert cli(["report", str(run)]) == 2
    refusal = capsys.readouterr().err
    assert refusal.count("\n") == 1
    assert name in refusal
    assert words in refusal
    assert cli(["runs", str(run), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["state"] == "broken"
    assert words in row["problem"]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("state.json", lambda v: v["progress"].update(step="x"), 'progress.step is "x"'),
        ("state.json", lambda v: v["progress"].update(tokens=10**400), "64 bits"),
        ("state.json", lambda v: v.update(progress=[1]), "progress is [1]"),
        ("state.json", lambda v: v.update(metrics="good"), 'metrics is "good"'),
        ("state.json", lambda v: v["environment"].update(threads=None), "environment.threads is null"),
        ("state.json", lambda v: v["environment"].pop("precision"), "environment.precision is missing"),
        ("MANIFEST.json", lambda v: v.update(files=[1]), "files is [1]"),
        ("MANIFEST.json", lambda v: v["files"].update({"state.json": 3}), "files.state.json is 3"),
        ("MANIFEST.json", lambda v: v.update(step={}), "step is {}"),
    ],
)
def test_a_snapshot_with_values_of_wrong_types_is_damaged(
    run: Path, name: str, change: Callable[[Values], object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = snapshot_file(run, name)
    edit(file, change)
    if name == "state.json":  # its hash is updated, so that only its types are wrong
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        edit(file.with_name("MANIFEST.json"), lambda values: values["files"].update({"state.json": digest}))
    assert cli(["snapshots", "list", str(run), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["snapshots"]}
    assert rows[file.parent.name]["torn"]
    assert cli(["snapshots", "show", str(run), "--snapshot", file.parent.name]) == 2
    refusal = capsys.readouterr().err.split("\n")[-2]  # a warning may precede the error
    assert refusal.startswith("sansgpu: ")
    assert words in refusal


def test_a_loss_that_was_not_finite_is_shown_as_null(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python writes NaN to state.json, which is not valid JSON; `--json` prints null instead."""
    file = snapshot_file(run, "state.json")
    edit(file, lambda values: values["metrics"].update(loss=float("nan")))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    edit(file.with_name("MANIFEST.json"), lambda values: values["files"].update({"state.json": digest}))
    assert cli(["snapshots", "show", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert shown["metrics"]["loss"] is None


def test_pipes_in_place_of_files_do_not_hang(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (snapshot_file(run, "state.json"), snapshot_file(run, "MANIFEST.json"), run / "metrics.jsonl"):
        file.unlink()
        os.mkfifo(file)
    assert cli(["report", str(run)]) == 0
    assert cli(["snapshots", "list", str(run)]) == 0
    assert cli(["snapshots", "show", str(run)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_keys_of_other_versions_are_fine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Later versions of sansgpu may add keys, and earlier ones wrote fewer."""
    edit(run / "environment.json", lambda values: values.update(more={"a": [1, "b"]}))
    edit(snapshot_file(run, "MANIFEST.json"), lambda values: values.update(signed="by nobody"))
    edit_line(run, line_of(run, "step"), lambda event: event.update(more={"a": [1, {"b": None}]}))
    optional = ("phase_seconds", "system", "elapsed_seconds", "total_steps", "mfu", "grad_norm", "rss_bytes")
    for number in range(2, 6):
        edit_line(run, number, lambda event: [event.pop(key, None) for key in optional])
    assert cli(["snapshots", "verify", str(run)]) == 0
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "later: {a: 1}\n")
    assert cli(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""


def test_no_value_of_any_field_ends_a_reader(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report` and `runs` succeed although random lines of metrics.jsonl contain odd values."""
    draw, record = random.Random(0), run / "metrics.jsonl"
    lines = record.read_text().split("\n")[:-1]
    for _ in range(20):
        odd = list(lines)
        for number in draw.sample(range(len(lines)), 3):
            odd[number] = dumped(changed(json.loads(lines[number]), draw))
        record.write_text("\n".join(odd) + "\n")
        assert cli(["report", str(run)]) == 0
        assert cli(["runs", str(run)]) == 0
        assert capsys.readouterr().err.count("\n") <= 1


def test_every_place_of_a_snapshots_state_may_hold_anything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(run, "state.json")
    values, draw = json.loads(file.read_text()), random.Random(0)
    for *path, last in places(values):
        odd = copy.deepcopy(values)
        inner = odd
        for key in path:
            inner = inner[key]
        inner[last] = draw.choice(ODD)
        file.write_text(dumped(odd))
        assert cli(["snapshots", "list", str(run), *draw.choice([[], ["--json"]])]) == 0
    assert capsys.readouterr().err == ""

"""Damaged snapshots are reported, old ones are pruned, and bad input never deletes one."""

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.train.snapshots import clear_leftovers, snapshots
from tests import processes
from tests.processes import environment, json_lines, messages, record, settings, write_corpus, write_rows

pytestmark = pytest.mark.usefixtures("home")


train = partial(processes.train, training__max_steps=12)


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    assert train(home, home / "trained") == 0
    return home / "trained"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def names(run: Path) -> list[str]:
    return [s.folder.name for s in snapshots(run / "snapshots")]


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_a_snapshot_holds_safetensors_and_json_and_nothing_else(run: Path) -> None:
    files = {path.name for path in (run / "snapshots" / "step-000012").iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"}


def test_the_newest_and_the_best_snapshots_are_kept(home: Path, tmp_path: Path) -> None:
    assert train(home, tmp_path / "r", training__keep_last=1, training__save_steps=2, training__eval_steps=6) == 0
    assert names(tmp_path / "r")[-1] == "step-000012"
    best = json.loads((tmp_path / "r/snapshots/step-000012/state.json").read_text())["progress"]["best_step"]
    assert names(tmp_path / "r") == sorted({"step-000012", f"step-{best:06d}"})


@pytest.mark.parametrize("damage", ["altered", "truncated", "no manifest", "torn manifest"])
def test_a_damaged_snapshot_is_reported_and_the_previous_one_is_used(
    home: Path, run: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, before = snapshots(run / "snapshots")[-1], snapshots(run / "snapshots")[-2]
    match damage:
        case "altered":
            alter(newest.folder / "model.safetensors")
        case "truncated":
            (newest.folder / "optimizer.safetensors").write_bytes(b"short")
        case "no manifest":
            (newest.folder / "MANIFEST.json").unlink()
        case "torn manifest":
            (newest.folder / "MANIFEST.json").write_text('{"step": 12, "fi')
    assert train(home, run, "--resume") == 0
    said = capsys.readouterr().out
    assert newest.folder.name in said
    assert "skipped" in said
    assert f"resumed from {before.folder.name}" in said


def test_the_snapshot_that_a_run_resumes_from_is_not_shown_as_saved(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(home, run, "--resume", training__max_steps=13) == 0
    shown = capsys.readouterr().out
    assert shown.count("resumed from step-000012") == 1
    assert f"; the model is in {run}/final\n" in shown
    assert [line for line in shown.splitlines() if line.startswith("snapshot ")] == ["snapshot step-000013"]
    recorded = [event["path"] for event in record(run) if event["event"] == "snapshot"]
    assert recorded[-2:] == ["step-000012", "step-000013"]


def test_a_run_without_an_intact_snapshot_is_not_resumed(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for snapshot in snapshots(run / "snapshots"):
        alter(snapshot.folder / "state.json")
    assert train(home, run, "--resume") == 2
    assert "the run cannot be continued" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("precision", "fp8"), ("compile", "perhaps"), ("kernels", 3), ("threads", 0)]
)
def test_a_snapshot_with_an_environment_that_cannot_be_is_refused(
    home: Path, run: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    for snapshot in snapshots(run / "snapshots"):
        file, manifest = snapshot.folder / "state.json", snapshot.folder / "MANIFEST.json"
        state = json.loads(file.read_text())
        state["environment"][key] = value
        file.write_text(json.dumps(state))
        listed = json.loads(manifest.read_text())
        listed["files"]["state.json"] = hashlib.sha256(file.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(listed))
    for command in (["eval", str(run)], ["generate", str(run), "--max-new-tokens", "1"]):
        assert cli(command) == 2
        (line,) = messages(capsys.readouterr().err)
        assert f"state.json cannot be read (environment.{key} " in line
    assert train(home, run, "--resume", training__precision="auto") == 2
    assert f"environment.{key} " in messages(capsys.readouterr().err)[-1]


def test_a_damaged_snapshot_requested_by_name_is_refused(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alter(run / "snapshots/step-000012/model.safetensors")
    assert train(home, run, "--resume", "step-000012") == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


def test_a_snapshot_of_a_different_model_is_refused_and_the_run_is_unchanged(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "tensorboard" not in str(p)}
    assert train(home, run, "--resume", model__d_ff=64) == 2
    assert "feed_forward" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in before} == before


def test_a_snapshot_of_a_different_optimizer_is_refused(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(home, run, "--resume", training__optimizer="adamw") == 2
    assert "a different optimizer" in capsys.readouterr().err


def test_different_data_is_reported_and_refused_if_strict(
    home: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_corpus(tmp_path / "other.jsonl", seed=5)
    more = {"data__dataset_name": other, "data__tokenizer": run / "tokenizer", "training__max_steps": 13}
    assert train(home, run, "--resume", "--strict", **more) == 2
    assert "different data" in capsys.readouterr().err
    assert train(home, run, "--resume", **more) == 0


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_a_run_keeps_its_tokenizer_when_its_data_changes(
    home: Path, tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model would read a newly trained tokenizer's ids as different words."""

    def write(words: str) -> Path:
        return write_rows(tmp_path / "data.jsonl", [{"text": f"{number} {words}"} for number in range(200)])

    data = write("otters and badgers and otters")
    values = {"data__dataset_name": data, "data__tokenizer": tokenizer, "training__max_steps": 4}
    assert train(home, tmp_path / "r", **values) == 0
    files = ["tokenizer/tokenizer.json", "final/tokenizer.json"]
    before = [(tmp_path / "r" / file).read_bytes() for file in files]
    recorded = (tmp_path / "r/config.yaml").read_text()
    write("zebras quickly ran over every hill: §")
    assert train(home, tmp_path / "r", "--resume", **{**values, "training__max_steps": 6}) == 0
    assert "different data" in capsys.readouterr().out
    assert [(tmp_path / "r" / file).read_bytes() for file in files] == before
    assert (tmp_path / "r/config.yaml").read_text() == recorded.replace("max_steps: 4", "max_steps: 6")
    last = [line for line in json_lines(tmp_path / "r/metrics.jsonl") if line["event"] == "eval"][-1]
    assert cli(["eval", str(tmp_path / "r"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_a_different_thread_count_is_reported_and_refused_if_strict(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"training__threads": 2, "training__max_steps": 14}
    assert train(home, run, "--resume", "--strict", **more) == 2
    assert "threads 1, now 2" in capsys.readouterr().err
    assert train(home, run, "--resume", **more) == 0
    assert "threads 1, now 2" in capsys.readouterr().out


def test_a_disk_that_fills_while_saving_leaves_the_last_snapshot(home: Path, tmp_path: Path) -> None:
    """A limit just below the size of the largest snapshot file simulates a full disk."""
    run = tmp_path / "full"
    assert train(home, run, training__max_steps=4) == 0
    largest = max(path.stat().st_size for path in (run / "snapshots").rglob("*"))
    command = ["train", *settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=12)]
    done = subprocess.run(
        [sys.executable, "-m", "sansgpu", *command, "--output-dir", str(run), "--resume"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, largest - 1)),
        capture_output=True,
        text=True,
        env=environment(home / "cache"),
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert cli(["snapshots", "verify", str(run)]) == 0
    assert names(run) == ["step-000003", "step-000004"]


def test_a_disk_that_fills_during_a_fork_is_reported_in_one_short_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, unlimited = names(run), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    try:
        assert cli(["snapshots", "fork", str(run), "--output-dir", str(tmp_path / "fork")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    error = capsys.readouterr().err
    assert f"{tmp_path / 'fork'} cannot be written: File too large.\n" in error
    assert error.count("File too large") == 1
    assert not list(tmp_path.glob("fork*"))
    assert names(run) == before


def test_leftovers_of_a_killed_process_are_deleted_and_a_replaced_snapshot_is_restored(run: Path) -> None:
    folder = run / "snapshots"
    (folder / ".step-000099.partial").mkdir()
    (folder / "step-000012").rename(folder / ".step-000012.replaced")
    (folder / ".sansgpu-0123456789abcdef").touch()
    clear_leftovers(folder)
    assert not (folder / ".sansgpu-0123456789abcdef").exists()
    assert not list(folder.glob(".step-*"))
    assert "step-000012" in names(run)


def test_list_show_verify_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["snapshots", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["snapshots"]
    assert [row["name"] for row in rows] == names(run)
    assert sum(row["best"] for row in rows) == 1
    assert cli(["snapshots", "show", str(run), "--snapshot", "best", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["name"] == next(row["name"] for row in rows if row["best"])
    assert shown["progress"]["step"] == shown["step"]
    assert cli(["snapshots", "verify", str(run)]) == 0
    alter(run / "snapshots/step-000012/model.safetensors")
    assert cli(["snapshots", "verify", str(run)]) == 1
    assert "step-000012" in capsys.readouterr().out
    assert cli(["snapshots", "prune", str(run), "--keep-last", "0"]) == 2
    assert cli(["snapshots", "prune", str(run), "--keep-last", "1"]) == 0
    assert "step-000012" in names(run)
    assert len(names(run)) <= 2


def test_a_fork_trains_independently_and_leaves_its_origin_unchanged(home: Path, run: Path, tmp_path: Path) -> None:
    step = snapshots(run / "snapshots")[0].step
    before = names(run)
    fork = tmp_path / "fork"
    assert cli(["snapshots", "fork", str(run), "--snapshot", str(step), "--output-dir", str(fork)]) == 0
    assert names(fork) == [f"step-{step:06d}"]
    steps = [line.get("step", 0) for line in json_lines(fork / "metrics.jsonl")]
    assert max(steps) <= step
    assert cli(["train", "--resume", "--output-dir", str(fork), "--set", "training.max_steps=14"]) == 0
    assert names(fork)[-1] == "step-000014"
    assert names(run) == before
    assert cli(["snapshots", "fork", str(run), "--output-dir", str(fork)]) == 2

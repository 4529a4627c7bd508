"""Snapshots written in the background equal those written synchronously."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sansgpu.config import SansGPUError
from sansgpu.models.formats.safetensors_file import save_tensors
from sansgpu.train import writer
from sansgpu.train.snapshots import snapshots
from sansgpu.train.writer import SnapshotWriter, Tensors
from tests import processes
from tests.processes import digests, record, write_corpus

pytestmark = pytest.mark.usefixtures("home")


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=200)


def tensors(seed: int, rows: int = 700) -> Tensors:
    """Returns tensors of various layouts and dtypes, some larger than a block, of sizes that do not fill pages."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "ünïcode": torch.randn(rows, 1001, generator=draw),
        "scattered": torch.randn(1001, rows, generator=draw).T,
        "half": torch.randn(33, 7, generator=draw).bfloat16(),
        "scalar": torch.randn((), generator=draw),
        "empty": torch.empty(0, 3),
        "flags": torch.randn(5, generator=draw) > 0,
        "counts": torch.arange(3),
    }


def a_writer(folder: Path, said: list[str] | None = None, **more: Any) -> SnapshotWriter:
    return SnapshotWriter(folder / "snapshots", 2, folder / "metrics.jsonl", (said or []).append, **more)


@pytest.mark.parametrize("rows", [0, 3, 1047, 2100])
def test_a_tensor_file_is_the_one_that_safetensors_writes(tmp_path: Path, rows: int) -> None:
    state = tensors(0, rows)
    save_tensors(state, tmp_path / "ours")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_changes_while_a_snapshot_is_written_is_not_in_it(tmp_path: Path) -> None:
    weights, moments = tensors(1), tensors(2)
    behind, before = a_writer(tmp_path / "behind"), a_writer(tmp_path / "before", available=lambda: 0)
    for step in (1, 2, 3):
        for made in (before, behind):
            made.submit(step, weights, moments, {"step": step}, best_step=1)
        for tensor in (*weights.values(), *moments.values()):
            tensor.fill_(step)
    behind.wait()
    assert digests(tmp_path / "behind") == digests(tmp_path / "before") != {}
    kept = snapshots(tmp_path / "behind" / "snapshots")
    assert [snapshot.step for snapshot in kept] == [1, 2, 3]  # the newest two and the best
    assert [snapshot.problem() for snapshot in kept] == [None] * 3


def test_without_memory_for_a_copy_training_waits_with_one_warning(tmp_path: Path) -> None:
    said: list[str] = ["nothing yet"]
    made = a_writer(tmp_path, said, available=lambda: 0)
    for step in (1, 2):
        made.submit(step, tensors(1), tensors(2), {}, None)
        assert not made.busy
        assert snapshots(tmp_path / "snapshots")[-1].problem() is None
    assert len(said) == 2
    assert "training pauses" in said[1]


def test_a_failed_write_is_reported_once_and_earlier_snapshots_stay_intact(tmp_path: Path) -> None:
    made = a_writer(tmp_path)
    made.submit(1, tensors(1), tensors(2), {}, None)
    made.wait()
    (tmp_path / "snapshots" / ".step-000002.partial").write_text("in the way")
    made.submit(2, tensors(1), tensors(2), {}, None)
    with pytest.raises(SansGPUError, match=r"step 2 cannot be written.*earlier snapshots are intact"):
        made.wait()
    made.wait()
    assert [s.problem() for s in snapshots(tmp_path / "snapshots")] == [None]


def train(home: Path, run: str, *more: str) -> int:
    return processes.train(home, home / run, *more, training__max_steps=20, training__keep_last=9)


@pytest.fixture(scope="module")
def straight(home: Path) -> Path:
    assert train(home, "straight") == 0
    return home / "straight"


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float, and_then: Any = lambda step: None) -> list[int]:
    """Delays every snapshot by `seconds`; returns the list of written steps."""
    write, steps = writer.save_snapshot, []

    def slowly(folder: Path, step: int, *arguments: Any) -> None:
        steps.append(step)
        and_then(step)
        time.sleep(seconds)
        write(folder, step, *arguments)

    monkeypatch.setattr(writer, "save_snapshot", slowly)
    return steps


@pytest.mark.long
def test_how_long_writing_takes_makes_no_difference(
    home: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_disk(monkeypatch, 0.2)
    assert train(home, "slow") == 0
    assert record(home / "slow") == record(straight)
    assert digests(home / "slow") == digests(straight)


def test_a_signal_while_a_snapshot_is_written(home: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(step: int) -> None:
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        steps = slow_disk(patch, 0.2, interrupt)
        assert train(home, "signalled") == 143
    said = record(home / "signalled")
    assert [e["step"] for e in said if e["event"] == "snapshot"] == steps
    assert said[-1]["reason"] == "interrupted"
    assert [s.step for s in snapshots(home / "signalled" / "snapshots")] == steps
    assert all(s.problem() is None for s in snapshots(home / "signalled" / "snapshots"))
    assert train(home, "signalled", "--resume") == 0
    assert record(home / "signalled") == record(straight)


def test_a_failed_write_ends_the_run_which_resumes_from_an_earlier_snapshot(
    home: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(step: int) -> None:
        if step == 12:
            (home / "refused" / "snapshots" / ".step-000012.partial").write_text("in the way")

    with monkeypatch.context() as patch:
        slow_disk(patch, 0.05, refuse)
        assert train(home, "refused") == 1
    assert "the snapshot of step 12 cannot be written" in capsys.readouterr().err
    assert snapshots(home / "refused" / "snapshots")[-1].step < 12
    (home / "refused" / "snapshots" / ".step-000012.partial").unlink()
    assert train(home, "refused", "--resume") == 0
    assert record(home / "refused") == record(straight)
    assert digests(home / "refused") == digests(straight)

"""Commands that delete snapshots never delete files of another run or of the user."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from tests.hostile.test_written_files import resume, state, train
from tests.processes import sentence

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def other(home: Path) -> Path:
    """Trains a run with snapshots in its own folder and one with snapshots in its `training.checkpoint_dir`."""
    assert cli(train(home, home / "inside", steps=12)) == 0
    assert cli(train(home, home / "apart", steps=12, training__checkpoint_dir=home / "checkpoints")) == 0
    return home


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    """Trains a run that the tests point to another run's snapshots."""
    assert cli(train(home, tmp_path / "run")) == 0
    return tmp_path / "run"


@pytest.mark.parametrize("place", ["inside/snapshots", "checkpoints"])
def test_another_runs_snapshots_are_neither_pruned_nor_continued(
    place: str, other: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run / "config.yaml").read_text()
    assert "checkpoint_dir: null" in text
    (run / "config.yaml").write_text(text.replace("checkpoint_dir: null", f"checkpoint_dir: {other / place}"))
    capsys.readouterr()
    before = state(other)
    for command in (
        ["snapshots", "prune", str(run), "--keep-last", "1"],
        ["snapshots", "prune", str(run), "--abandoned"],
        resume(run, "--max-steps", "20"),
        resume(run, "--max-steps", "20", "--set", f"training.checkpoint_dir={other / place}"),
    ):
        assert cli(command) == 2
        assert f"{other / place} contains another run's snapshots" in sentence(capsys)
    assert state(other) == before


def test_links_to_another_runs_snapshots_are_not_pruned(
    other: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "snapshots")
    (run / "snapshots").symlink_to(other / "inside/snapshots")
    capsys.readouterr()
    before = state(other)
    assert cli(["snapshots", "prune", str(run), "--keep-last", "1"]) == 2
    assert f"{run / 'snapshots'} is a symlink" in sentence(capsys)
    assert state(other) == before


def test_a_run_prunes_its_own_snapshots_elsewhere(other: Path, tmp_path: Path) -> None:
    checkpoints = Path(shutil.copytree(other / "checkpoints", tmp_path / "checkpoints"))
    run = Path(shutil.copytree(other / "apart", tmp_path / "run"))
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(other / "checkpoints"), str(checkpoints)))
    assert len(list(checkpoints.glob("step-*"))) > 1
    assert cli(["snapshots", "prune", str(run), "--keep-last", "1"]) == 0
    assert (checkpoints / "step-000012").is_dir()
    assert not (checkpoints / "step-000004").exists()


def test_notes_in_an_abandoned_branch_survive(other: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(other / "inside", tmp_path / "run"))
    assert cli(resume(run, "--resume", "8", "--max-steps", "9")) == 0
    branch = run / "snapshots/abandoned-from-step-000008"
    (branch / "notes.md").write_text("mine")
    (branch / "step-000012/more.md").write_text("mine, too")
    assert cli(["snapshots", "prune", str(run), "--abandoned"]) == 0
    assert not branch.exists()
    kept = [path for path in branch.with_name(f"{branch.name}.notes").rglob("*") if path.is_file()]
    assert {path.name: path.read_text() for path in kept} == {"notes.md": "mine", "more.md": "mine, too"}

"""Each snapshot is reported once, and the order of events does not depend on how long writing takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from sansgpu.config import Config, RunPaths
from sansgpu.events.event import EventBuffer, Sinks
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import Memory
from sansgpu.train.checkpoint import Saver
from sansgpu.train.run import TrainingRun
from sansgpu.train.snapshots import snapshots
from sansgpu.train.state import TrainState


@pytest.fixture
def buffer() -> EventBuffer:
    return EventBuffer()


@pytest.fixture
def sinks(buffer: EventBuffer) -> Sinks:
    return Sinks([buffer])


@pytest.fixture
def saver(tmp_path: Path, sinks: Sinks) -> Saver:
    config = Config.model_validate({"training": {"optimizer": "adamw"}})
    memory = Memory(0, 0, 0, 0, 0, 0, 0)
    run = TrainingRun(config, Execution(), total_steps=3, memory=memory, available=0, paths=RunPaths(tmp_path))
    state = TrainState.create(nn.Linear(2, 2), config.training, run.execution)
    state.progress.step = 1
    return Saver(run, state, "data", sinks, lambda: 0.0)


def names(buffer: EventBuffer) -> list[str]:
    return [event["event"] for event in buffer.events]


def test_events_after_a_snapshot_wait_until_it_is_reported(saver: Saver, sinks: Sinks, buffer: EventBuffer) -> None:
    saver.save({"loss": 1.0}, is_last=False)
    sinks.emit({"event": "step", "step": 2})
    assert names(buffer) == []
    saver.flush()
    saver.flush()
    assert names(buffer) == ["snapshot", "step"]


def test_an_unchanged_step_is_not_saved_again_but_new_metrics_are(
    saver: Saver, buffer: EventBuffer, tmp_path: Path
) -> None:
    for metrics in (None, None, {"loss": 1.0}, {"loss": 1.0}):
        saver.save(metrics, is_last=True)
        saver.flush()
    assert names(buffer) == ["snapshot", "snapshot"]
    assert [snapshot.validation_loss() for snapshot in snapshots(tmp_path / "snapshots")] == [1.0]


def test_a_resumed_snapshot_is_reported_and_not_written(saver: Saver, buffer: EventBuffer, tmp_path: Path) -> None:
    saver.save(None, is_last=True)
    saver.flush()
    newest = saver.newest
    assert newest is not None
    written = (newest.folder / "state.json").stat().st_mtime_ns
    saver.restore(newest, None)
    for _ in range(2):
        saver.save(None, is_last=True)
        saver.flush()
    assert names(buffer) == ["snapshot", "snapshot"]
    assert (newest.folder / "state.json").stat().st_mtime_ns == written


def test_a_snapshot_that_cannot_be_written_becomes_a_warning_at_the_end(
    saver: Saver, sinks: Sinks, buffer: EventBuffer, tmp_path: Path
) -> None:
    (tmp_path / "snapshots").write_text("a file in the way")
    saver.save(None, is_last=False)
    sinks.emit({"event": "step", "step": 2})
    saver.close()
    assert names(buffer) == ["step", "warning"]

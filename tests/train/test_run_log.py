"""MFU is relative to the best GEMM rate of this machine and never exceeds 100%."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sansgpu.config import Config, DataConfig
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import Memory
from sansgpu.machine.probe import isa
from sansgpu.tasks.graph.task import Graph
from sansgpu.train.run import TrainingRun
from sansgpu.train.run_log import StepLog, SystemStatistics
from sansgpu.train.snapshots import Progress
from sansgpu.train.step import StepResult
from sansgpu.views.terminal import Terminal
from tests.processes import events_of, train
from tests.tasks.graph.graphs import prepared


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    config, corpus = prepared(tmp_path_factory.mktemp("graph"))
    return Graph(config, corpus, 8)


def log_of(task: Graph, rate: float, folder: Path, system: SystemStatistics = lambda: None) -> StepLog:
    """Returns the step log of a run that measured the GEMM rate `rate` when it started."""
    config = Config(data=DataConfig(cache_dir=str(folder)))
    execution, memory = Execution(8, kernels="native", threads=2), Memory(0, 0, 0, 0, 0, 0, 0)
    run = TrainingRun(config, execution, total_steps=5, memory=memory, available=0, gemm_flops_per_second=rate)
    return StepLog(task, run, system)


def event_of(log: StepLog, seconds: float) -> dict[str, Any]:
    result = StepResult(1.0, 1, 10, 10.0, 1.0, {}, dict.fromkeys(("forward", "backward"), 0.0))
    log.add(seconds, 0.0, result)
    return log.event(Progress(step=1, logged_loss=1.0, logged_targets=1), result, 0.1, 5)


def test_a_step_that_beats_the_gemm_rate_has_it_measured_again(task: Graph, tmp_path: Path) -> None:
    log = log_of(task, 1.0, tmp_path)  # FLOP/s, as if other programs were very busy
    event = event_of(log, seconds=100.0)
    assert event["gemm_flops_per_second"] > 1e6
    assert event["mfu"] < 0.5
    assert event_of(log, seconds=100.0)["gemm_flops_per_second"] == event["gemm_flops_per_second"]


def test_mfu_is_unknown_if_the_model_exceeds_every_measurement(task: Graph, tmp_path: Path) -> None:
    event = event_of(log_of(task, 1.0, tmp_path), seconds=1e-12)
    assert event["mfu"] is None
    assert event["gemm_flops_per_second"] < 1e15  # a measured rate, not one derived from the step
    console = Console(file=StringIO(), width=200)
    Terminal(console).emit({**event, "eta_seconds": 1.0})
    assert "MFU unknown" in console.file.getvalue()


def test_the_gemm_rate_is_measured_again_when_the_machine_is_quieter(task: Graph, tmp_path: Path) -> None:
    loads = iter([90.0, 90.0, 5.0, 5.0])  # percent of a core that other programs use
    log = log_of(task, 1.0, tmp_path, lambda: {"other_percent": next(loads), "stolen_percent": None})
    slow = 1e15  # seconds, so that the model does not exceed the rate
    assert [event_of(log, slow)["gemm_flops_per_second"] for _ in range(2)] == [1.0, 1.0]
    assert event_of(log, slow)["gemm_flops_per_second"] > 1e6


def test_a_resumed_run_compares_with_the_same_rate(task: Graph, tmp_path: Path) -> None:
    """A resumed run uses the recorded rate if the earlier processes ran under the same conditions."""
    start = {"event": "start", "device": "cpu", "isa": isa(), "precision": "fp32", "threads": 2, "world_size": 1}
    recorded = [start, {"event": "step", "step": 1, "gemm_flops_per_second": 9e15}]
    other = [{**start, "threads": 64}, {"event": "step", "step": 2, "gemm_flops_per_second": 9e18}]
    log = log_of(task, 8e15, tmp_path)
    log.restore([*other, *recorded, {"event": "step", "step": 2}])
    assert event_of(log, seconds=1.0)["gemm_flops_per_second"] == 9e15


@pytest.mark.usefixtures("home")
def test_the_best_rate_ever_measured_here_counts(home: Path, tmp_path: Path) -> None:
    assert train(home, tmp_path / "first", training__max_steps=8) == 0
    (file,) = (f for f in (home / "cache/measured").iterdir() if "gemm" in json.loads(f.read_text())["question"])
    known = json.loads(file.read_text())
    first = events_of(tmp_path / "first", "step")
    rates = [event["gemm_flops_per_second"] for event in first]
    assert rates == sorted(rates)  # a run measures again when the machine becomes quiet
    assert rates[-1] == known["answer"]
    file.write_text(json.dumps({**known, "answer": 9e15}))  # an earlier measurement on a quiet machine
    assert train(home, tmp_path / "second", training__max_steps=8) == 0
    assert {event["gemm_flops_per_second"] for event in events_of(tmp_path / "second", "step")} == {9e15}
    file.write_text("{torn")
    assert train(home, tmp_path / "third", training__max_steps=8) == 0
    assert json.loads(file.read_text())["answer"] < 9e15

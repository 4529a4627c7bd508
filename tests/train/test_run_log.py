"""MFU compares with the best GEMM rate of this machine and is never above 100 %."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sansgpu.machine.probe import Environment
from sansgpu.tasks.graph import Graph
from sansgpu.train.run_log import StepLog
from sansgpu.train.state import Progress
from sansgpu.train.step import PhaseTimer, StepPlan, StepResult
from tests.tasks.graphs import prepared

ENVIRONMENT = Environment("2.13", "avx512", "cpu", 2, 1, "fp32", "off", "native", 8)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    config, corpus = prepared(tmp_path_factory.mktemp("graph"))
    return Graph(config, corpus, 8)


def log_of(task: Graph, rate: float) -> StepLog:
    """Returns a log of a run whose GEMM rate was `rate` at its start."""
    return StepLog(task, rate, StepPlan(8, torch.device("cpu"), "fp32"))


def event_of(log: StepLog, seconds: float) -> dict[str, Any]:
    log.add(seconds, 10, PhaseTimer())
    progress = Progress(step=1, logged_loss=1.0, logged_targets=1)
    return log.event(progress, StepResult(1.0, 1, 10, 1.0, {}), 0.1, 5)


def test_a_step_that_beats_the_gemm_rate_has_it_measured_again(task: Graph) -> None:
    log = log_of(task, rate=1.0)  # FLOP/s, as beside a very busy neighbor
    event = event_of(log, seconds=100.0)
    assert event["gemm_flops_per_second"] > 1e6
    assert event["mfu"] < 0.5
    assert event_of(log, seconds=100.0)["gemm_flops_per_second"] == event["gemm_flops_per_second"]


def test_mfu_is_never_above_one(task: Graph) -> None:
    event = event_of(log_of(task, rate=1.0), seconds=1e-12)
    assert event["mfu"] == 1.0


def test_a_resumed_run_compares_with_the_same_rate(task: Graph) -> None:
    """The rate is the record's if the earlier processes ran under the same conditions."""
    start = {"event": "start", "device": "cpu", "isa": "avx512", "precision": "fp32", "threads": 2, "world_size": 1}
    recorded = [start, {"event": "step", "step": 1, "gemm_flops_per_second": 9e15}]
    other = [{**start, "threads": 64}, {"event": "step", "step": 2, "gemm_flops_per_second": 9e18}]
    log = log_of(task, rate=8e15)
    log.restore([*other, *recorded, {"event": "step", "step": 2}], ENVIRONMENT)
    assert event_of(log, seconds=1.0)["gemm_flops_per_second"] == 9e15

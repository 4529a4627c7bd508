"""`training.adapt_threads` uses fewer threads while other processes keep every core busy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sansgpu.events.controls import Controls
from sansgpu.events.event import Event
from sansgpu.jobs.train import TrainRequest, train
from sansgpu.machine.monitor import Monitor
from sansgpu.machine.probe import available_cores
from sansgpu.tasks.configuration import load_config
from tests.processes import TINY, events_of, overrides, record, use_cache, write_corpus

ENOUGH_STEPS = 3000


class StopsAfterOneThread:
    """Ends the run one step after it switched to one thread."""

    def __init__(self, controls: Controls) -> None:
        self.controls = controls

    def emit(self, event: Event) -> None:
        if event["event"] == "step" and event["threads"] == 1:
            self.controls.stop()

    def close(self) -> None: ...


@pytest.fixture
def neighbors() -> Iterator[None]:
    """Keeps every core busy with other processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(available_cores())]
    yield
    for process in busy:
        process.kill()
        process.wait()


def endless(home: Path, **changes: object) -> tuple[str, ...]:
    own = {
        "data.dataset_name": write_corpus(home / "corpus.jsonl"), "training.threads": "auto",
        "training.max_steps": ENOUGH_STEPS, "training.logging_steps": 1, "training.eval_steps": 0,
        "training.save_steps": 0,
    }  # fmt: skip
    return tuple(overrides(TINY, own, changes))


@pytest.mark.long
@pytest.mark.skipif(available_cores() < 2, reason="at least two cores are needed")
def test_a_run_gives_way_to_its_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbors: None) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run, controls = tmp_path / "run", Controls()
    given = endless(tmp_path, training__adapt_threads="true")
    request = TrainRequest(None, given, run, controls=controls, monitor=Monitor(seconds=0.05))
    train(request, [StopsAfterOneThread(controls)], lambda *_: None)
    threads = [event["threads"] for event in record(run) if event["event"] == "step"]
    assert threads[0] == available_cores()
    assert threads[-1] == 1
    assert torch.get_num_threads() == 1
    said = [event for event in events_of(run) if event.get("cause") == "threads"]
    assert "training.threads is now 1 instead of" in said[-1]["message"]
    (snapshot,) = (run / "snapshots").glob("step-*")
    assert json.loads((snapshot / "state.json").read_text())["environment"]["threads"] == 1


def test_threads_that_were_asked_for_do_not_change(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="requires threads auto, but threads is 2"):
        load_config(None, ["training.threads=2", "training.adapt_threads=true"])

"""Processes that train by themselves and synchronize every N steps (`training.sync_every`) are one run."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sansgpu.cli import run as cli
from tests.processes import digests, events_of, record, settings, write_corpus
from tests.processes import finish as alone
from tests.scale.launch import finish, finish_forks, signal_after_snapshot, spoken, torchrun

STEPS, EVERY = 24, 4
# 7 examples are shared unevenly, and the last batch of an epoch may have fewer examples than there are ranks.
SHAPE = {
    "training__max_steps": STEPS, "training__sync_every": EVERY, "training__batch_size": 7,
    "training__gradient_accumulation_steps": 1, "training__save_steps": 8, "training__eval_steps": 6,
    "training__logging_steps": 3, "training__lr_scheduler": "constant", "training__timeout_seconds": 60,
    "data__pack_sequences": "false",
}  # fmt: skip


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=90)


def arguments(home: Path, run: str, *more: str, **changes: object) -> list[str]:
    chosen = {**SHAPE, "data__dataset_name": home / "corpus.jsonl", **changes}
    return ["train", *settings(**chosen), *more, "--output-dir", str(home / run)]


def forked(home: Path, run: str, ranks: int, *more: str, **changes: object) -> tuple[Path, str]:
    code, out = finish_forks(ranks, arguments(home, run, *more, **changes), home / "cache")
    assert code == 0, out
    return home / run, out


def last(run: Path) -> dict[str, str]:
    return {k: v for k, v in digests(run).items() if k.startswith((f"snapshots/step-{STEPS:06d}", "final"))}


def loss(run: Path) -> float:
    return float(str([event["loss"] for event in record(run) if event["event"] == "eval"][-1]))


@pytest.fixture(scope="module")
def straight(home: Path) -> Path:
    return forked(home, "straight", 2)[0]


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    shapes = [[draw.randint(1, 40) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 6))]
    if seed == 0:
        shapes.append([7, 1_000_000])  # larger than a message
    wire, narrow = draw.choice(["fp32", "bf16"]), draw.choice([True, False])
    return {"seed": seed, "shapes": shapes, "wire": wire, "narrow": narrow}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_an_outer_step_is_that_of_the_paper(ranks: int, tmp_path: Path) -> None:
    cases = [drawn(seed) for seed in range(6)]
    code, out = finish_forks(ranks, [json.dumps(cases)], tmp_path, module="tests.scale.outer")
    assert code == 0, out


def test_a_run_logs_evaluates_and_saves_only_when_synchronized(straight: Path) -> None:
    """Steps 3, 6, 9, ... are logged, 6, 12, 18, 24 evaluated and 8, 16, 24 saved, each at the next multiple of 4."""
    steps = {kind: [e["step"] for e in record(straight) if e["event"] == kind] for kind in ("step", "eval", "snapshot")}
    assert steps["step"] == [4, 8, 12, 16, 20, 24]
    assert steps["eval"] == [8, 12, 20, 24]
    assert set(steps["snapshot"]) >= {8, 16, 24}
    assert all(step % EVERY == 0 for step in steps["snapshot"])


@pytest.mark.long
def test_losses_are_close_to_those_of_processes_that_reduce_every_gradient(home: Path, straight: Path) -> None:
    together = forked(home, "together", 2, training__sync_every=1)[0]
    assert loss(straight) == pytest.approx(loss(together), rel=0.15)
    assert loss(straight) != loss(together)


def test_a_resumed_run_is_the_same_byte_by_byte(home: Path, straight: Path) -> None:
    run, _ = forked(home, "resumed", 2, training__max_steps=8)
    forked(home, "resumed", 2, "--resume", "latest")
    assert last(run) == last(straight)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_continues_byte_by_byte(home: Path, straight: Path, number: signal.Signals) -> None:
    run = home / f"stopped-{number}"
    signal_after_snapshot(run, arguments(home, run.name), home / "cache", number)
    if number == signal.SIGTERM:
        end = record(run)[-1]
        assert (end["reason"], int(str(end["step"])) % EVERY) == ("interrupted", 0)
    code, out = finish(torchrun(2), [*arguments(home, run.name), "--resume", "latest"], home / "cache")
    assert code == 0, out
    assert last(run) == last(straight)


@pytest.mark.long
def test_a_run_continues_with_other_processes_and_without_local_steps(home: Path) -> None:
    run, _ = forked(home, "changing", 2, training__max_steps=8)
    _, out = forked(home, "changing", 3, "--resume", "latest", training__max_steps=16)
    assert "was written with world_size 2, now 3" in out
    one = {"training__max_steps": 20, "training__sync_every": 1}
    code, out, error = alone(arguments(home, "changing", "--resume", "latest", **one), home / "cache")
    assert code == 0, error
    assert "was written with training.sync_every greater than 1" in " ".join(out.split())
    _, out = forked(home, "changing", 2, "--resume", "latest")
    assert "was written with training.sync_every 1" in out
    assert loss(run) < 5.8  # the loss of uniform guessing is 5.7


@pytest.mark.long
def test_a_round_ends_with_a_run_whose_time_is_up(home: Path) -> None:
    """The time limit ends before the first regular synchronization."""
    changes = {"training__max_steps": "null", "training__max_hours": 12 / 3600, "training__sync_every": 100_000}
    run, _ = forked(home, "timed", 2, **changes)
    [end] = events_of(run, "end")
    assert end["reason"] == "out_of_time"
    assert end["seconds"] < 14
    assert [event["step"] for event in events_of(run, "eval")] == [end["step"]]
    momenta = load_file(run / "snapshots" / str(end["snapshot"]) / "optimizer.safetensors")
    assert all(bool(value.any()) for name, value in momenta.items() if name.startswith("outer_momentum."))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "training.sync_every is 4, but there is only one process; set it to 1, or start several, e.g. with "
         "--processes 2."),
        ({"training__sharding": "optimizer"}, "sync_every 4 needs all weights in every process; set sharding to none, "
         "or sync_every to 1"),
        ({"training__optimizer": "adamw", "training__optimizer_state": "8bit"}, "set optimizer_state to fp32"),
        ({"training__sync_every": 0}, "sync_every"),
        ({"training__sync_every": "often"}, "sync_every"),
    ],
)  # fmt: skip
def test_local_steps_that_make_no_sense_are_refused(
    home: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], said: str
) -> None:
    assert cli(arguments(home, "refused", **changes)) == 2
    errors = spoken(capsys.readouterr().err)
    assert len(errors) == 1
    assert said in errors[0]
    assert not (home / "refused").exists()


@pytest.mark.long
def test_the_plan_of_a_cluster_divides_the_bytes_by_the_steps_between_synchronizations(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(**changes: object) -> dict[str, Any]:
        chosen = settings(data__dataset_name=home / "corpus.jsonl", training__optimizer="adamw", **changes)
        capsys.readouterr()
        assert cli(["plan", *chosen, "--nodes", "2", "--network", "100mbit", "--json"]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    plan, together = planned(training__sync_every=50), planned()
    cluster, every = plan["cluster"], together["cluster"]
    assert (cluster["sync_every"], every["sync_every"]) == (50, 1)
    assert (cluster["gradient_bytes"], every["gradient_bytes"]) == (8 * plan["parameters"], 4 * plan["parameters"])
    assert cluster["communication_seconds"] == pytest.approx(2 / 50 * every["communication_seconds"], rel=0.1)
    assert cluster["memory_bytes"]["optimizer"] == 2 * every["memory_bytes"]["optimizer"]

"""One, two or four real processes give the same run with every launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes import TINY, digests, overrides, record, settings, write_corpus
from tests.processes import finish as alone
from tests.scale.launch import NEEDS_MPI, finish, finish_forks, mpirun, signal_after_snapshot, spoken, torchrun

STEPS = 50
# 2, 3 or 4 processes cannot share 7 examples per step evenly, and an epoch's last batch is even smaller.
SHAPE = {
    "model__dropout": 0, "training__max_steps": STEPS, "training__batch_size": 7,
    "training__gradient_accumulation_steps": 1, "training__save_steps": 20, "training__eval_steps": 10,
    "training__logging_steps": 1, "training__timeout_seconds": 60, "data__pack_sequences": "false",
}  # fmt: skip
SHARDED = ("--set", "training.sharding=optimizer")
CUT = ("--set", "training.sharding=full")


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=90)


def arguments(home: Path, run: str, *more: str, **changes: object) -> list[str]:
    chosen = {**SHAPE, "data__dataset_name": home / "corpus.jsonl", **changes}
    return ["train", *settings(**chosen), *more, "--output-dir", str(home / run)]


def completed(home: Path, run: str, launcher: Sequence[str], *more: str, **changes: object) -> Path:
    """Trains a run unless it exists, so that several tests can use it."""
    if not (home / run / "final").exists():
        code, out = finish(launcher, arguments(home, run, *more, **changes), home / "cache")
        assert code == 0, out
    return home / run


def forked(home: Path, run: str, ranks: int, *more: str, **changes: object) -> Path:
    code, out = finish_forks(ranks, arguments(home, run, *more, **changes), home / "cache")
    assert code == 0, out
    return home / run


@pytest.fixture(scope="module")
def one(home: Path) -> Path:
    code, _, error = alone(arguments(home, "one"), home / "cache")
    assert code == 0, error
    return home / "one"


def losses(run: Path) -> list[float]:
    return [float(str(event["loss"])) for event in record(run) if event["event"] in ("step", "eval")]


def last(run: Path) -> dict[str, str]:
    """Returns the digests of the last snapshot and final/."""
    return {k: v for k, v in digests(run).items() if k.startswith((f"snapshots/step-{STEPS:06d}", "final"))}


def same_losses(run: Path, other: Path) -> None:
    assert len(losses(run)) == len(losses(other)) == STEPS + STEPS // 10
    assert max(abs(a - b) for a, b in zip(losses(run), losses(other), strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("ranks", "launched"), [(2, False), *(pytest.param(ranks, True, marks=pytest.mark.long) for ranks in (2, 4))]
)
def test_losses_do_not_depend_on_the_number_of_processes(home: Path, one: Path, ranks: int, launched: bool) -> None:
    run = completed(home, f"torchrun-{ranks}", torchrun(ranks)) if launched else forked(home, f"forks-{ranks}", ranks)
    same_losses(run, one)
    assert record(run)[0]["world_size"] == ranks


@pytest.mark.parametrize("sharding", ["optimizer", pytest.param("full", marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_sharding_changes_nothing_that_is_learned(home: Path, one: Path, ranks: int, sharding: str) -> None:
    run = forked(home, f"{sharding}-{ranks}", ranks, "--set", f"training.sharding={sharding}")
    same_losses(run, one)


@pytest.mark.long
def test_muon_updates_matrices_whose_rows_do_not_divide_evenly(home: Path) -> None:
    """33 rows are split into 17 and 16."""
    uneven = {"model__d_ff": 33, "training__optimizer": "muon", "training__max_steps": 6, "training__eval_steps": 3}
    code, _, error = alone(arguments(home, "uneven-1", **uneven), home / "cache")
    assert code == 0, error
    run = forked(home, "uneven-2", 2, *CUT, **uneven)
    assert losses(run) == pytest.approx(losses(home / "uneven-1"), abs=1e-4)


@pytest.mark.long
def test_a_run_continues_with_any_number_of_processes_and_any_sharding(home: Path, one: Path) -> None:
    more: tuple[str, ...] = ()
    for stop, ranks, sharding in ((12, 1, ()), (20, 2, CUT), (30, 4, SHARDED), (36, 3, CUT), (44, 2, ())):
        # With a constant learning rate, a run of `stop` steps equals the beginning of a longer run.
        code, out = finish(torchrun(ranks), arguments(home, "changing", *more, *sharding,
                           training__save_steps=stop, training__max_steps=stop,
                           training__lr_scheduler="constant"), home / "cache")  # fmt: skip
        assert code == 0, out
        more = ("--resume", "latest")
    code, out = finish(torchrun(1), arguments(home, "changing", *more, training__lr_scheduler="constant"),
                       home / "cache")  # fmt: skip
    assert code == 0, out
    assert "was written with world_size 2, now 1" in out
    straight = completed(home, "constant", torchrun(1), training__lr_scheduler="constant")
    by_step = [
        {e["step"]: e["loss"] for e in record(run) if e["event"] == "step"} for run in (home / "changing", straight)
    ]
    assert by_step[0].keys() == by_step[1].keys()
    assert all(abs(float(str(by_step[0][s])) - float(str(by_step[1][s]))) < 1e-4 for s in by_step[0])


@pytest.mark.skipif(NEEDS_MPI, reason="mpirun is not installed")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long)])
def test_mpirun_is_one_run(home: Path, one: Path, ranks: int) -> None:
    same_losses(completed(home, f"mpirun-{ranks}", mpirun(ranks)), one)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_again_is_the_same_byte_by_byte(home: Path, ranks: int) -> None:
    """The repetition uses a different launcher."""
    first, again = completed(home, f"torchrun-{ranks}", torchrun(ranks)), home / f"processes-{ranks}"
    flags = ("--processes", str(ranks), "--headless")
    code, out, error = alone(arguments(home, again.name, *flags), home / "cache")
    assert code == 0, error
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines].count("end") == 1, "only one process may print events"
    assert lines[0]["world_size"] == ranks
    assert lines[0]["threads"] == 1
    assert last(again) == last(first)
    assert record(again) == record(first)


@pytest.mark.long
def test_an_output_folder_with_a_run_is_reported_by_one_rank_only(home: Path) -> None:
    completed(home, "torchrun-2", torchrun(2))
    code, _, error = alone(arguments(home, "torchrun-2", "--processes=2"), home / "cache")
    assert code == 2
    assert spoken(error) == [f"{home}/torchrun-2 already contains a run; continue it with --resume, or choose "
                             "another --output-dir."]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_once_and_the_run_continues(home: Path, one: Path, number: signal.Signals) -> None:
    run = home / f"interrupted-{number}"
    signal_after_snapshot(run, arguments(home, run.name), home / "cache", number)
    assert record(run)[-1]["reason"] == "interrupted"
    completed(home, run.name, torchrun(2), "--resume", "latest")
    assert last(run) == last(completed(home, "torchrun-2", torchrun(2)))


@pytest.mark.long
def test_an_impossible_run_is_reported_by_one_rank_only(home: Path) -> None:
    code, out = finish(torchrun(2), arguments(home, "none", training__batch_size=1), home / "cache")
    assert code != 0
    assert spoken(out) == ["a step has 1 example for 2 processes, and each needs at least one; raise "
                           "training.gradient_accumulation_steps or start fewer processes."]  # fmt: skip


@pytest.mark.long
def test_too_many_threads_are_refused(home: Path) -> None:
    many = len(os.sched_getaffinity(0))
    if many < 2:
        pytest.skip("at least two CPUs are needed")
    code, out = finish(torchrun(2), arguments(home, "threads", training__threads=many), home / "cache")
    assert code != 0
    assert len(spoken(out)) == 1
    assert f"2 processes with {many} threads each exceed the {many} processors" in out


@pytest.mark.long
def test_a_network_interface_that_is_not_there_is_refused(home: Path) -> None:
    code, out = finish(torchrun(2), arguments(home, "interface", training__network_interface="eth77"), home / "cache")
    assert code != 0
    assert "training.network_interface is eth77, but " in out


@pytest.mark.long
def test_hosts_with_another_configuration_are_refused(home: Path) -> None:
    script = 'case $RANK in 1) more="--set training.learning_rate=0.5";; esac; exec "$0" -m sansgpu "$@" $more'

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    code, out = finish([*launcher, "sh", "-c", script], arguments(home, "other"), home / "cache", module=sys.executable)
    assert code != 0
    assert "training.learning_rate is 0.5 on rank 1 and 0.0" in out, out


def test_requests_on_rank_0_are_followed_by_all_ranks(home: Path) -> None:
    chosen = overrides(TINY, SHAPE, {"data.dataset_name": home / "corpus.jsonl"})
    code, out = finish_forks(2, [str(home / "steered"), *chosen], home / "cache", "tests.scale.steered")
    assert code == 0, out
    events = record(home / "steered")
    assert [event["step"] for event in events if event["event"] == "eval"] == [2]
    assert [event["step"] for event in events if event["event"] == "snapshot"] == [2, 6]
    assert [(event["step"], event["reason"]) for event in events if event["event"] == "end"] == [(6, "interrupted")]
    assert "state interrupted, steps 6 of 50" in out


@pytest.mark.parametrize(
    "changes",
    [
        {"training__sharding": "full"},
        pytest.param({"training__sharding": "none"}, marks=pytest.mark.long),
        pytest.param({"training__sharding": "optimizer"}, marks=pytest.mark.long),
        pytest.param({"training__sync_every": 4}, marks=pytest.mark.long),
    ],
)
def test_processes_end_early_together_with_the_best_model(home: Path, changes: dict[str, object]) -> None:
    overfitted = {
        "data__dataset_name": write_corpus(home / "short.jsonl", 12), "data__validation_split": 0.3,
        "data__pack_sequences": "true", "training__learning_rate": 0.03, "training__batch_size": 2,
        "training__max_steps": 300, "training__eval_steps": 4, "training__early_stopping_patience": 2,
    }  # fmt: skip
    run = forked(home, f"early-{'-'.join(map(str, changes.values()))}", 2, **overfitted, **changes)
    end = record(run)[-1]
    found = {event["step"]: float(str(event["loss"])) for event in record(run) if event["event"] == "eval"}
    best = min(found, key=found.__getitem__)
    assert (end["reason"], end["final_step"], end["step"]) == ("early_stopping", best, best + 8)
    exported = home / f"{run.name}-best"
    assert alone(["export", str(run), "--snapshot", "best", "--output", str(exported)], home / "cache")[0] == 0
    assert digests(exported)["model.safetensors"] == digests(run)["final/model.safetensors"]

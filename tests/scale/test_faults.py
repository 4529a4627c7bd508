"""A killed process, a cut network or a full disk ends in correct weights or an error that names the lost rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from benchmarks.distributed.hosts import Host, cut, refused, two_hosts

from tests.processes import digests, environment, record, settings, write_corpus
from tests.scale.launch import NEEDS_MPI, finish, finish_forks, mpirun, spoken, torchrun
from tests.scale.launch import start as started

STEPS = 30
SHAPE = {
    "training__max_steps": STEPS, "training__batch_size": 4, "training__gradient_accumulation_steps": 1,
    "model__dropout": 0, "training__save_steps": 7, "training__eval_steps": 0, "training__timeout_seconds": 15,
}  # fmt: skip
LAST = f"snapshots/step-{STEPS:06d}"
SECONDS = 90


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=90)


def arguments(home: Path, run: str, **changes: object) -> list[str]:
    chosen = {**SHAPE, "data__dataset_name": home / "corpus.jsonl", **changes}
    return ["train", *settings(**chosen), "--output-dir", str(home / run)]


def last(run: Path) -> dict[str, str]:
    return {k: v for k, v in digests(run).items() if k.startswith((LAST, "final"))}


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> dict[str, str]:
    code, out = finish_forks(2, arguments(home, "undisturbed"), home / "cache")
    assert code == 0, out
    return last(home / "undisturbed")


def faulty(home: Path, run: str, place: str, rank: int, count: int) -> dict[str, str]:
    mark = str(home / f"{run}.mark")
    return {"FAULT": place, "FAULT_RANK": str(rank), "FAULT_COUNT": str(count), "FAULT_MARK": mark}


LONG = pytest.mark.long


@LONG
@pytest.mark.parametrize(
    ("place", "rank", "count"),
    [
        ("backward", 1, 200),
        ("backward", 0, 200),
        ("all-reduce", 1, 25),
        ("all-reduce", 0, 25),
        ("snapshot", 0, 9),
    ],
)
def test_a_killed_process_is_replaced_and_the_run_is_the_same(
    home: Path, undisturbed: dict[str, str], place: str, rank: int, count: int
) -> None:
    run = f"{place}-{rank}"
    fault = faulty(home, run, place, rank, count)
    launcher = torchrun(2, "--max-restarts=1")
    code, out = finish(launcher, arguments(home, run), home / "cache", module="tests.scale.faulty", **fault)
    assert code == 0, out
    assert Path(fault["FAULT_MARK"]).exists(), "no process was killed"
    assert f"rank {rank} of 2" in spoken(out)[0]
    assert last(home / run) == undisturbed
    steps = [event["step"] for event in record(home / run) if event["event"] == "step"]
    assert steps == sorted(set(steps)), "a step was recorded twice"


@LONG
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named_and_nothing_hangs(home: Path, undisturbed: dict[str, str], rank: int) -> None:
    run = f"named-{rank}"
    fault, began = faulty(home, run, "backward", rank, 330), time.monotonic()
    code, out = finish(torchrun(2), arguments(home, run), home / "cache", module="tests.scale.faulty", **fault)
    assert code != 0
    assert time.monotonic() - began < SECONDS
    assert f"rank {rank} of 2" in spoken(out)[0]
    assert "is lost" in spoken(out)[0]
    newest = max(int(path.name.removeprefix("step-")) for path in (home / run / "snapshots").glob("step-*"))
    assert bool(newest % 7) == (rank == 1), "rank 0 must save the last complete step"
    code, out = finish(torchrun(2), [*arguments(home, run), "--resume", "latest"], home / "cache")
    assert code == 0, out
    assert last(home / run) == undisturbed


@LONG
def test_a_killed_process_is_named_although_torch_communicates_by_itself(home: Path) -> None:
    changes = {"training__sharding": "full"}
    fault = faulty(home, "sharded", "reduce-scatter", 1, 20)
    code, out = finish(
        torchrun(2), arguments(home, "sharded", **changes), home / "cache", module="tests.scale.faulty", **fault
    )
    assert code != 0
    assert "rank 1 of 2" in spoken(out)[0]
    assert "is lost" in spoken(out)[0]


@LONG
@pytest.mark.skipif(NEEDS_MPI, reason="mpirun is not installed")
def test_under_mpirun_a_killed_process_ends_all(home: Path, undisturbed: dict[str, str]) -> None:
    fault = faulty(home, "mpi", "backward", 1, 300)
    code, out = finish(mpirun(2), arguments(home, "mpi"), home / "cache", module="tests.scale.faulty", **fault)
    assert code != 0, out
    code, out = finish(mpirun(2), [*arguments(home, "mpi"), "--resume", "latest"], home / "cache")
    assert code == 0, out
    assert last(home / "mpi") == undisturbed


@LONG
def test_a_process_that_stands_still_is_named(home: Path) -> None:
    """A stopped process keeps its connections open; only missing heartbeats reveal it."""
    process = started(torchrun(2), arguments(home, "still", training__max_steps=5000), home / "cache")
    wait_for_snapshot(home / "still", process)
    stopped = next(child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1")
    stopped.suspend()
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "rank 1 of 2" in spoken(out)[0]


def wait_for_snapshot(run: Path, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + SECONDS
    while not list((run / "snapshots").glob("step-*")) and time.monotonic() < limit:
        assert process.poll() is None
        time.sleep(0.05)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a small disk requires Linux and root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@LONG
def test_a_full_disk_on_rank_0_ends_all_in_its_words(home: Path, small_disk: Path, undisturbed: dict[str, str]) -> None:
    run = small_disk / "run"
    process = started(torchrun(2), [*arguments(home, "x", training__max_steps=2000)[:-1], str(run)], home / "cache")
    wait_for_snapshot(run, process)
    with (small_disk / "filling").open("wb") as filling:
        free = shutil.disk_usage(small_disk).free
        filling.write(b"x" * max(0, free - 8192))
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert len(spoken(out)) == 1, out
    assert "cannot be written" in out
    (small_disk / "filling").unlink()
    shutil.rmtree(run / "final", ignore_errors=True)
    code, out = finish(
        torchrun(2), [*arguments(home, "x", training__max_steps=2000)[:-1], str(run), "--resume", "latest",
                      "--set", "training.max_hours=0.003"], home / "cache"
    )  # fmt: skip
    assert code == 0, out


NEEDS_HOSTS = pytest.mark.skipif(refused() is not None, reason=refused() or "")
DISTANT = {"training__max_steps": 300, "training__save_steps": 40}


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def on_hosts(
    hosts: tuple[Host, Host], home: Path, run: str, each: int = 1, late: float = 0.0, **changes: object
) -> list[subprocess.Popen[bytes]]:
    """Starts the same command on both hosts."""
    variables = {**environment(home / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    agent = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={each}", "--rdzv-backend=c10d"]
    agent += [f"--rdzv-endpoint={hosts[0].name}:29400", f"--rdzv-id={run}", "-m", "sansgpu"]
    processes = []
    for number, host in enumerate(hosts):
        time.sleep(late * number)
        log = home / f"{run}.{host.name[-1]}.log"
        processes.append(host.start([*agent, *arguments(home, run, **changes)], log, variables))
    return processes


def logs(home: Path, run: str) -> list[list[str]]:
    return [spoken((home / f"{run}.{letter}.log").read_text(errors="replace")) for letter in "ab"]


@NEEDS_HOSTS
@LONG
@pytest.mark.parametrize(("each", "late"), [(1, 0.0), (2, 0.0), (1, 8.0)])
def test_two_hosts_are_one_run(
    home: Path, undisturbed: dict[str, str], hosts: tuple[Host, Host], each: int, late: float
) -> None:
    run = f"hosts-{each}-{late}"
    assert [p.wait(SECONDS) for p in on_hosts(hosts, home, run, each, late)] == [0, 0], logs(home, run)
    if each == 1:
        assert last(home / run) == undisturbed
    losses = [[e["loss"] for e in record(home / r) if e["event"] == "step"] for r in (run, "undisturbed")]
    assert max(abs(float(str(a)) - float(str(b))) for a, b in zip(*losses, strict=True)) < 1e-4


@NEEDS_HOSTS
@LONG
def test_a_network_that_comes_back_costs_nothing(home: Path, hosts: tuple[Host, Host]) -> None:
    code, out = finish(torchrun(2), arguments(home, "whole", **DISTANT), home / "cache")
    assert code == 0, out
    processes = on_hosts(hosts, home, "back", **DISTANT)
    wait_for_snapshot(home / "back", processes[0])
    cut(hosts[0])
    time.sleep(5)
    cut(hosts[0], now=False)
    assert [p.wait(SECONDS) for p in processes] == [0, 0], logs(home, "back")
    assert digests(home / "back")["final/model.safetensors"] == digests(home / "whole")["final/model.safetensors"]


@NEEDS_HOSTS
@LONG
def test_a_network_that_is_gone_ends_both_sides(home: Path, hosts: tuple[Host, Host]) -> None:
    processes = on_hosts(hosts, home, "gone", **DISTANT)
    wait_for_snapshot(home / "gone", processes[0])
    cut(hosts[0])
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit and not all(logs(home, "gone")):
        time.sleep(0.2)
    near, far = logs(home, "gone")  # their launchers may wait some minutes for each other
    assert "rank 1 of 2" in near[0]
    assert "is lost" in near[0]
    assert "rank 0 of 2" in far[0]
    for process in processes:
        process.kill()
    found = {path.name for path in (home / "gone/snapshots").glob("step-*")}
    steps = sorted(int(name.removeprefix("step-")) for name in found)
    assert steps[-1] % 40, "rank 0 must save the last complete step"


@LONG
def test_torchrun_continues_with_fewer_hosts(home: Path, undisturbed: dict[str, str]) -> None:
    """One of two agents on this machine is killed with its process; the other continues."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
             "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29477", "--rdzv-id=elastic", "--max-restarts=3",
             "--local-addr=127.0.0.1", "-m"]  # fmt: skip
    long = {"training__max_steps": 400, "training__save_steps": 40}
    (home / "empty.yaml").write_text("{}")  # without a configuration, only an existing run can be resumed
    command = [*arguments(home, "elastic", **long), "--config", str(home / "empty.yaml"), "--resume", "latest"]
    first = started(agent, command, home / "cache")
    time.sleep(1.0)  # so that the first agent hosts the rendezvous
    second = started(agent, command, home / "cache")
    wait_for_snapshot(home / "elastic", first)
    gone = [psutil.Process(second.pid), *psutil.Process(second.pid).children(recursive=True)]
    for each in gone:  # the test plays a host that was lost
        each.kill()
    second.communicate()
    out, _ = first.communicate(timeout=2 * SECONDS)
    assert first.returncode == 0, out
    assert json.loads((home / "elastic/environment.json").read_text())["world_size"] == 1
    code, out = finish(torchrun(1), arguments(home, "elastic-alone", **long), home / "cache")
    assert code == 0, out
    losses = [{e["step"]: float(str(e["loss"])) for e in record(home / r) if e["event"] == "step"}
              for r in ("elastic", "elastic-alone")]  # fmt: skip
    assert losses[0].keys() == losses[1].keys()
    assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 1e-4

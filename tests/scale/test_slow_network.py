"""On two hosts with a slow network, a step takes as long as `plan` estimates, and local steps send fewer bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median

import pytest
from benchmarks.distributed.hosts import Host, refused, sent_bytes, shape, two_hosts

from sansgpu.cli import run as cli
from tests.processes import environment, events_of, settings, write_corpus

pytestmark = [pytest.mark.long, pytest.mark.skipif(refused() is not None, reason=refused() or "")]
NEEDS_DELAY = pytest.mark.skipif(refused(delay=True) is not None, reason=refused(delay=True) or "")
RATE, STEPS = "100mbit", 10
# Much to send and little to compute: 3.2M weights and 128 tokens per step.
SHAPE = {
    "model__d_model": 128, "model__d_ff": 4096, "model__dropout": 0, "training__optimizer": "adamw",
    "training__max_steps": STEPS, "training__logging_steps": 1, "training__eval_steps": 0, "training__save_steps": 0,
    "training__eval_batches": 1,
}  # fmt: skip
SECONDS = 240


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=90)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def options(home: Path, **changes: object) -> list[str]:
    return settings(**{**SHAPE, "data__dataset_name": home / "corpus.jsonl", **changes})


def trained(hosts: tuple[Host, Host], home: Path, run: str, **changes: object) -> tuple[float, int]:
    """Trains on both hosts; returns the median seconds of a step and the bytes that the first host sent."""
    variables = {**environment(home / "cache"), "OMP_NUM_THREADS": "1"}
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    agent += [f"--rdzv-endpoint={hosts[0].name}:29400", f"--rdzv-id={run}", "-m", "sansgpu", "train"]
    before, logs = sent_bytes(hosts[0]), [home / f"{run}.{host.name[-1]}.log" for host in hosts]
    command = [*agent, *options(home, **changes), "--output-dir", str(home / run)]
    processes = [host.start(command, log, variables) for host, log in zip(hosts, logs, strict=True)]
    codes = [process.wait(SECONDS) for process in processes]
    assert codes == [0, 0], [log.read_text(errors="replace")[-500:] for log in logs]
    seconds = [event["step_seconds"] for event in events_of(home / run, "step")]
    return median(seconds[1:] or seconds), sent_bytes(hosts[0]) - before


@pytest.mark.parametrize("delay", [None, pytest.param("5ms", marks=NEEDS_DELAY)])
def test_a_step_takes_as_long_as_planned(home: Path, hosts: tuple[Host, Host], delay: str | None) -> None:
    network = ["--nodes", "2", "--network", RATE, *(["--latency", delay] if delay else [])]
    with redirect_stdout(io.StringIO()) as out:
        assert cli(["plan", *options(home), *network, "--json"]) == 0
    cluster = json.loads(out.getvalue())["cluster"]
    shape(hosts, RATE, delay)
    seconds, sent = trained(hosts, home, f"planned-{delay}")
    assert cluster["communication_seconds"] > 0.7 * cluster["step_seconds"]
    assert seconds == pytest.approx(cluster["step_seconds"], rel=0.15)
    # A ring of two sends every gradient once; the weights of the first host are broadcast at the start.
    assert sent == pytest.approx((STEPS + 1) * cluster["gradient_bytes"], rel=0.1)


def test_local_steps_send_five_times_fewer_bytes(home: Path, hosts: tuple[Host, Host]) -> None:
    shape(hosts, RATE)
    together_seconds, together = trained(hosts, home, "together", training__max_steps=2 * STEPS)
    local_seconds, local = trained(hosts, home, "local", training__max_steps=2 * STEPS, training__sync_every=2 * STEPS)
    start = together / (2 * STEPS + 1)  # the weights, which are broadcast before the first step
    assert together - start > 5 * (local - start) > 0
    assert together_seconds > 3 * local_seconds

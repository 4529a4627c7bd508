"""Compares step times of two connected hosts with the estimates of `plan --nodes`.

    python -m benchmarks.distributed.cluster

The hosts are network namespaces on this machine (needs root and iproute2), each with one process of one thread; tc
limits the bandwidth between them. The compute time of a host is measured without communication, while the other host
computes as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import ours
from benchmarks.contest import WARM_UP, NoResultError, Row, add_ratios, print_table, row_of, say, spawn, write_json
from benchmarks.distributed.hosts import Host, refused, shape, two_hosts
from benchmarks.speed.scaling import BASE, parameters
from sansgpu.machine.distributed.gloo_rate import Link, measure_gloo
from sansgpu.planning.nodes import NodeShare, NodeStep, NodeWork, link_of, step_of
from sansgpu.train.gradient_reduction import BUCKET_BYTES

Settings = dict[str, object]
NODES = 2
MICRO_BATCH, PIECES = 4, 4  # windows per micro-batch, micro-batches per step of both nodes
CHOSEN: Settings = {  # fixed, because `auto` depends on the batch or on measurements
    "training.optimizer": "adamw",
    "training.precision": "fp32",
    "training.compile": "off",
}
TOY: Settings = {"model.d_model": 32, "model.n_heads": 2, "model.n_layers": 2, "model.d_ff": 64}
SIZES = {"7M": {}, "toy": TOY, **parameters()}
RATES = {"unshaped": None, "5gbit": 5e9, "1gbit": 1e9, "100mbit": 1e8}
UNSHAPED = 1e12  # bits per second; gloo is then the bottleneck
GRADIENT_BYTES = 4  # per element
PORT = 29400
SECONDS = 1800  # a run that takes longer counts as hanging
HOSTS = {
    "cable": ("name", "s"),
    "step s": ("step_seconds", ".3f"),
    "estimated s": ("estimated_seconds", ".3f"),
    "measured / estimated": ("ratio", ".2f"),
    "compute s": ("compute_seconds", ".3f"),
    "communication s": ("communication_seconds", ".3f"),
    "overlapped s": ("overlapped_seconds", ".3f"),
    "efficiency": ("efficiency", ".0%"),
}
PROCESSES = {
    "one machine": ("name", "s"),
    "step s": ("step_seconds", ".3f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "x first": ("ratio", ".2f"),
}


def settings_of(size: str, steps: int, pieces: int = PIECES, threads: int | str = 1) -> Settings:
    """Returns the settings of a run with `steps` steps after the warm-up and `pieces` micro-batches per step."""
    return {
        **BASE,
        **SIZES[size],
        **ours.MEASURED,
        "training.batch_size": MICRO_BATCH,
        "training.gradient_accumulation_steps": pieces,
        "training.max_steps": WARM_UP + steps,
        "training.threads": threads,
        **CHOSEN,
    }


def step_seconds(run: Path) -> float:
    """Returns the median step time of a run. Raises NoResultError if there are no steps."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if run.exists() else []
    steps = [event["step_seconds"] for event in map(json.loads, lines) if event["event"] == "step"][WARM_UP:]
    if not steps:
        raise NoResultError("the run logged no steps after the warm-up")
    return float(median(steps))


def here(name: str, run: Path, settings: Settings, *more: str) -> Row:
    """Measures a run on this machine. Raises NoResultError if it fails."""
    say(name)
    outcome = spawn([*ours.command(run, settings), *more])
    if outcome.code:
        raise outcome.no_result()
    start = outcome.named("start")[0][1]
    seconds = step_seconds(run)
    tokens = start["tokens_per_step"] / seconds
    return {"name": name, "step_seconds": seconds, "tokens_per_second": tokens, "parameters": start["parameters"]}


def side_by_side(folder: Path, settings: Settings) -> Row:
    """Measures two independent concurrent runs and returns the slower one. Raises NoResultError if one fails."""
    with ThreadPoolExecutor(NODES) as pool:
        names = [f"half the batch, one of {NODES} at once" for _ in range(NODES)]
        runs = [pool.submit(here, name, folder / f"half-{i}", settings) for i, name in enumerate(names)]
        return max((run.result() for run in runs), key=lambda row: float(row["step_seconds"]))


def over_cable(name: str, hosts: tuple[Host, Host], folder: Path, settings: Settings) -> float:
    """Returns the step time of a run on both hosts. Raises NoResultError if it fails."""
    say(f"two hosts, {name}")
    launcher = ["-m", "torch.distributed.run", f"--nnodes={NODES}", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    launcher += [f"--rdzv-endpoint={hosts[0].name}:{PORT}", f"--rdzv-id={name}", "-m"]
    run, logs = folder / name, [folder / f"{name}-{i}.log" for i in range(NODES)]
    arguments = [*launcher, *ours.command(run, settings)[2:]]
    started = [host.start(arguments, log, dict(os.environ)) for host, log in zip(hosts, logs, strict=True)]
    codes = [process.wait(timeout=SECONDS) for process in started]
    if any(codes):
        raise NoResultError(f"exit codes {codes}: {' '.join(logs[0].read_text(errors='replace').split())[-300:]}")
    return step_seconds(run)


def estimate(compute_seconds: float, numbers: int, embedding: int, bits_per_second: float, gloo: Link) -> NodeStep:
    """Returns the estimate of `plan --nodes` for a step with `numbers` gradient elements."""
    share = NodeShare(NODES, MICRO_BATCH, PIECES // NODES)
    work = NodeWork(compute_seconds / share.pieces, 0.0, 0.0, numbers * GRADIENT_BYTES, embedding * GRADIENT_BYTES)
    return step_of(work, share, link_of(bits_per_second, 0.0, gloo))


def hosts_rows(folder: Path, size: str, steps: int, one: Row, half: Row) -> Iterator[Row]:
    """Yields measured and estimated steps for every bandwidth."""
    settings = settings_of(size, steps)
    embedding = int(str(settings["model.vocab_size"])) * int(str(settings["model.d_model"]))
    gloo = measure_gloo(BUCKET_BYTES, "float32")
    say(f"gloo: {gloo.bytes_per_second / 1e6:,.0f} MB/s, {gloo.hop_seconds * 1e6:.0f} us a hop")
    with two_hosts() as hosts:
        for name, rate in RATES.items():
            if rate:
                shape(hosts, name)
            step = estimate(half["step_seconds"], one["parameters"], embedding, rate or UNSHAPED, gloo)

            def row(name: str = name, step: NodeStep = step) -> Row:
                seconds = over_cable(name, hosts, folder, settings)
                return {
                    "name": name,
                    "step_seconds": seconds,
                    "estimated_seconds": step.seconds,
                    "ratio": seconds / step.seconds,
                    "compute_seconds": step.compute,
                    "communication_seconds": step.communication,
                    "overlapped_seconds": step.hidden,
                    "efficiency": one["step_seconds"] / seconds / NODES,
                }

            yield row_of(name, row)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.cluster", description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=12, help=f"measured steps after a warm-up of {WARM_UP} (%(default)s)"
    )
    parser.add_argument("--size", choices=SIZES, default="7M", help="parameters (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    if reason := refused():
        sys.exit(f"benchmarks.distributed.cluster: {reason}")
    chosen = partial(settings_of, args.size, args.steps)
    with tempfile.TemporaryDirectory(prefix="sansgpu-cluster-") as temporary:
        folder = Path(temporary)
        one = here("1 thread", folder / "one", chosen())
        half = side_by_side(folder, chosen(PIECES // NODES))
        both = [
            row_of("2 threads", partial(here, "2 threads", folder / "threads", chosen(threads=2))),
            row_of("2 processes", partial(here, "2 processes", folder / "processes", chosen(), "--processes", "2")),
        ]
        rows = list(hosts_rows(folder, args.size, args.steps, one, half))
    alone = [one, *both, half]
    add_ratios(alone, "tokens_per_second", "1 thread")
    print_table(f"{args.size} parameters on one machine", PROCESSES, alone)
    print_table("Two hosts of one thread; efficiency against one host with the whole batch", HOSTS, rows)
    write_json(args.json, "cluster", vars(args), [*alone, *rows])


if __name__ == "__main__":
    main()

"""Measures the fraction of its speed that a run keeps while another program uses one of the cores.

    python -m benchmarks.speed.neighbor --size cpu_small
    python -m benchmarks.speed.neighbor --peers hf-bf16 --json OUT

Every contestant trains alone, next to a process that keeps one core busy, and next to one that uses that core for 5 of
every 10 milliseconds. Two programs share a core equally, so the fair speed on n cores is (n - 0.5) / n of the speed
alone. Needs Linux, where a process can be pinned to a core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import corpus, ours
from benchmarks.contest import Contestant, Row, print_table, say, take_turns, write_json
from benchmarks.sizes import SIZES, Size
from benchmarks.speed.peers import add_arguments, parse, peer_contestants, settings_of

ALONE = "nothing"
NEIGHBORS = {"a busy process": 0.0, "a half busy process": 0.005}  # seconds of sleep after every 5 ms of work
PROGRAM = """
import os, sys, time
core, idle_seconds, parent = int(sys.argv[1]), float(sys.argv[2]), os.getppid()
os.sched_setaffinity(0, [core])
while os.getppid() == parent:
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        pass
    if idle_seconds:
        time.sleep(idle_seconds)
"""
COLUMNS = {
    "contestant": ("contestant", "s"),
    "beside": ("beside", "s"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "of the speed alone": ("ratio", ".2f"),
    "of the fair speed": ("fair_ratio", ".2f"),
    "micro-batch": ("variant", "s"),
}


@contextmanager
def neighbor(core: int, idle_seconds: float) -> Iterator[None]:
    """Runs a process that uses one core until the context ends."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(core), str(idle_seconds)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def with_neighbors(contestant: Contestant, core: int) -> list[Contestant]:
    """Returns the contestant alone and next to each of NEIGHBORS on `core`."""
    beside = [
        replace(contestant, name=f"{contestant.name} beside {name}", beside=partial(neighbor, core, idle))
        for name, idle in NEIGHBORS.items()
    ]
    return [replace(contestant, name=f"{contestant.name} beside {ALONE}"), *beside]


def add_speeds(rows: Sequence[Row], size: Size, cores: int) -> None:
    """Adds speeds and ratios to the rows, in which each contestant's run alone must come first."""
    alone: dict[str, float] = {}
    for row in rows:
        row["contestant"], _, row["beside"] = row["name"].partition(" beside ")
        if "median_step_seconds" in row:
            row["tokens_per_second"] = speed = size.tokens_a_step / row["median_step_seconds"]
            if row["beside"] == ALONE:
                alone[row["contestant"]] = speed
            elif row["contestant"] in alone:
                row["ratio"] = speed / alone[row["contestant"]]
                row["fair_ratio"] = row["ratio"] * cores / (cores - 0.5)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.neighbor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, "", 3)
    args = parse(parser)
    if not hasattr(os, "sched_setaffinity"):
        parser.error("this system cannot pin a process to a core; run the benchmark on Linux")
    return args


def main() -> None:
    args = arguments()
    size = SIZES[args.size]
    data = str(Path(args.data).resolve()) if os.path.exists(args.data) else args.data
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="sansgpu-neighbor-") as name:
        folder = Path(name)
        say("preparing the data")
        facts = corpus.prepare(data, size.vocab_size, folder)
        field = [ours.contestant("sansgpu", folder / "ours", settings_of(size, data), args.steps)]
        field += peer_contestants(size, args.peers, args.steps, folder)
        rows = take_turns([one for contestant in field for one in with_neighbors(contestant, cores[-1])], args.rounds)
    add_speeds(rows, size, len(cores))
    title = f"{args.size} on {len(cores)} cores, medians of {args.steps} steps x {args.rounds}"
    print_table(title, COLUMNS, rows)
    write_json(args.json, "neighbor", {**vars(args), "data": facts}, rows)


if __name__ == "__main__":
    main()

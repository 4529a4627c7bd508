"""Compares sansgpu's data-parallel engine with torch's: `python -m benchmarks.distributed.engines --processes 2`.

Every engine trains the same small decoder in real gloo processes with one thread each. All engines of a comparison are
started at once and train alternately, a block of steps each, in the order A B C C B A. "ours again" is a second fleet
of sansgpu's engine, which shows the noise of the machine. Then each engine is checked against the contracts of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.contest import ROOT, WARM_UP, NoResultError, Row, print_table, row_of, say, write_json

COMPARISONS = {  # sansgpu's engine first
    "replicated": (
        "ours",
        "DDP",
        "DDP, summing hook",
        "DDP, summing hook, fixed buckets",
        "DDP, summing hook, our AdamW",
    ),
    "optimizer": ("ours, ZeRO-1", "DDP, ZeroRedundancyOptimizer"),
    "full": ("ours, full", "fully_shard"),
}
REFERENCE = "ours"  # the engine whose results in a single process the others must equal
AGAIN = "ours again"
TIMEOUT_SECONDS = 20.0  # for a collective
ANSWER_SECONDS = 240.0  # a worker that takes longer to answer counts as hanging
BEFORE_KILL_SECONDS = 1.5
TIMES = {
    "engine": ("name", "s"),
    "step s": ("median_step_seconds", ".3f"),
    "x ours": ("ratio", ".3f"),
    "from": ("ratio_low", ".3f"),
    "to": ("ratio_high", ".3f"),
    "CPU s": ("cpu_seconds", ".3f"),
    "x ours ": ("cpu_ratio", ".3f"),
    "peak MB a rank": ("peak_rss_mb", ",.0f"),
    "x ours  ": ("memory_ratio", ".3f"),
}
CONTRACTS = {
    "engine": ("name", "s"),
    "loss error": ("loss_error", ".0e"),
    "gradient error": ("gradient_error", ".0e"),
    "equal on repeat": ("equal_on_repeat", ""),
    "equal on resume": ("equal_on_resume", ""),
    "error on half the processes": ("elastic_error", ".0e"),
    "uneven micro-batches": ("uneven", "s"),
    "lost rank: s": ("lost_seconds", ".1f"),
    "message": ("lost_message", "s"),
}


class Fleet:
    """The worker processes of one engine, which wait for commands."""

    def __init__(self, engine: str, processes: int, options: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
        shared = {**os.environ, **world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "benchmarks.distributed.engine_worker", engine, *options]
        self._errors = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(processes)]  # noqa: SIM115  closed by __exit__
        self._workers = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, errors in enumerate(self._errors)
        ]
        self._answers: list[queue.Queue[str]] = [queue.Queue() for _ in self._workers]
        for worker, answers in zip(self._workers, self._answers, strict=True):
            threading.Thread(target=_read, args=(worker, answers), daemon=True).start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker, errors in zip(self._workers, self._errors, strict=True):
            worker.kill()
            worker.wait()
            errors.close()

    def send(self, **command: Any) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(command) + "\n")
            worker.stdin.flush()

    def ask(self, **command: Any) -> list[Row]:
        """Returns the answers of all ranks. Raises NoResultError if a rank exits or does not answer."""
        try:
            self.send(**command)
        except BrokenPipeError:
            raise NoResultError(self.last_error(0)) from None
        found = []
        for rank, answers in enumerate(self._answers):
            try:
                line = answers.get(timeout=ANSWER_SECONDS)
            except queue.Empty:
                raise NoResultError(f"rank {rank} does not answer within {ANSWER_SECONDS:.0f} s") from None
            if not line:
                raise NoResultError(self.last_error(rank))
            found.append(json.loads(line))
        return found

    def losses(self, count: int, uneven: bool = False) -> list[float]:
        """Trains some steps and returns their losses."""
        return list(self.ask(do="steps", count=count, uneven=uneven)[0]["losses"])

    def save(self, file: Path) -> str:
        """Saves the whole state and returns the SHA-256 of the file."""
        return str(self.ask(do="save", file=str(file))[0]["sha256"])

    def last_error(self, rank: int) -> str:
        """Returns the last line with an error that a rank wrote to stderr before it exited, or else its last line."""
        self._workers[rank].wait(timeout=ANSWER_SECONDS)
        self._errors[rank].seek(0)
        lines = [line for line in self._errors[rank].read().splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), ["nothing on stderr", *lines][-1]).strip()

    def lose_last_rank(self) -> tuple[float, str]:
        """Kills the last rank in a step. Returns the seconds until all others have ended, and rank 0's message."""
        self.send(do="steps", count=1_000_000)
        time.sleep(BEFORE_KILL_SECONDS)
        start = time.monotonic()
        self._workers[-1].send_signal(signal.SIGKILL)
        try:
            for worker in self._workers:
                worker.wait(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            return time.monotonic() - start, "hangs"
        return time.monotonic() - start, self.last_error(0)


def _read(worker: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    """Queues the lines of a worker, and an empty one at its end."""
    assert worker.stdout is not None
    for line in worker.stdout:
        answers.put(line)
    answers.put("")


def time_engines(names: Sequence[str], processes: int, rounds: int, steps: int, options: Sequence[str]) -> list[Row]:
    """Returns a row per engine. A block has `steps` measured steps after one that refills the caches."""
    labels = [names[0], AGAIN, *names[1:]]
    blocks: dict[str, list[list[float]]] = {label: [] for label in labels}  # seconds of the steps of each block
    cpu: dict[str, list[float]] = {label: [] for label in labels}  # seconds per step of all ranks, of each block
    peaks: dict[str, int] = {}
    with ExitStack() as stack:
        fleets = {
            label: stack.enter_context(Fleet(names[0] if label == AGAIN else label, processes, options))
            for label in labels
        }
        for fleet in fleets.values():
            fleet.ask(do="steps", count=WARM_UP)
        for number in range(rounds):
            say(f"{processes} processes, {names[0]}: round {number + 1} of {rounds}")
            for label in [*labels, *reversed(labels)]:
                fleets[label].ask(do="steps", count=1)
                answers = fleets[label].ask(do="steps", count=steps)
                blocks[label].append(answers[0]["seconds"])
                cpu[label].append(sum(answer["cpu_seconds"] for answer in answers))
                peaks[label] = max(answer["peak_rss_bytes"] for answer in answers)
    wall = {label: [median(block) for block in found] for label, found in blocks.items()}
    return [
        {
            "name": label,
            "median_step_seconds": median(second for block in blocks[label] for second in block),
            **_ratios("ratio", wall[label], wall[names[0]]),
            "cpu_seconds": median(cpu[label]),
            **_ratios("cpu_ratio", cpu[label], cpu[names[0]]),
            "peak_rss_bytes": peaks[label],
            "peak_rss_mb": peaks[label] / 1e6,
            "memory_ratio": peaks[label] / peaks[names[0]],
            "step_seconds": blocks[label],
        }
        for label in labels
    ]


def _ratios(key: str, blocks: Sequence[float], base: Sequence[float]) -> Row:
    """Returns the median and the quartiles of the time relative to `base`, over rounds of two blocks each."""
    rounds = [sum(blocks[i : i + 2]) / sum(base[i : i + 2]) for i in range(0, len(base), 2)]
    low, middle, high = np.percentile(rounds, [25, 50, 75])
    return {key: float(middle), f"{key}_low": float(low), f"{key}_high": float(high)}


def reference(folder: Path, options: Sequence[str]) -> tuple[list[float], Path]:
    """Returns the losses of five steps of one process, and its state after the first step."""
    with Fleet(REFERENCE, 1, options) as fleet:
        first = fleet.losses(1)
        fleet.save(file := folder / "reference.safetensors")
        return [*first, *fleet.losses(4)], file


def check_contracts(name: str, processes: int, expected: list[float], state: Path, options: Sequence[str]) -> Row:
    """Checks an engine: equality with one process, repeats and resumes, uneven micro-batches, and a lost rank."""
    say(f"{processes} processes, contracts: {name}")
    row: Row = {"name": name}
    files = [state.with_name(f"{number}.safetensors") for number in range(4)]
    with Fleet(name, processes, options) as fleet:
        losses = fleet.losses(1)
        fleet.save(files[0])
        losses += fleet.losses(1)
        fleet.save(files[1])
        losses += fleet.losses(2)
        whole = fleet.save(files[2])
    row |= {"loss_error": _error(losses, expected), "gradient_error": gradient_error(files[0], state)}
    with Fleet(name, processes, options) as fleet:
        fleet.losses(4)
        row["equal_on_repeat"] = fleet.save(files[3]) == whole
        try:
            row["uneven"] = f"error {_error(fleet.losses(1, uneven=True), expected[4:]):.0e}"
        except NoResultError as failure:
            row["uneven"] = str(failure)
    with Fleet(name, processes, options) as fleet:
        fleet.ask(do="load", file=str(files[1]), step=2)
        fleet.losses(2)
        row["equal_on_resume"] = fleet.save(files[3]) == whole
        row["lost_seconds"], row["lost_message"] = fleet.lose_last_rank()
        row["lost_rank_named"] = f"rank {processes - 1}" in row["lost_message"]
    with Fleet(name, processes // 2, options) as fleet:
        fleet.ask(do="load", file=str(files[1]), step=2)
        row["elastic_error"] = _error(fleet.losses(2), expected[2:])
    say(json.dumps(row))
    return row


def gradient_error(file: Path, expected: Path) -> float:
    """Returns the relative error of the first gradient, to which the first moment is proportional after one step."""
    found, right = load_file(file), load_file(expected)
    assert found.keys() == right.keys()
    names = [name for name in right if name.startswith("exp_avg.")]
    off = sum(float(np.square(found[name] - right[name]).sum()) for name in names)
    return float((off / sum(float(np.square(right[name]).sum()) for name in names)) ** 0.5)


def _error(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative error of the losses; `losses` may be fewer than expected."""
    return max(abs(found / right - 1) for found, right in zip(losses, expected, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=2, help="at least 2 (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per block (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of two blocks each; 0: check contracts only")
    parser.add_argument("--size", default="7M", help="7M or tiny (%(default)s)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--comparisons", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--no-contracts", action="store_true", help="measure time and memory only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.processes < 2:
        parser.error("--processes must be at least 2")
    options = ["--size", args.size, "--precision", args.precision, "--timeout", str(TIMEOUT_SECONDS)]
    rows: list[Row] = []
    for kind in args.comparisons if args.rounds else ():
        timed = time_engines(COMPARISONS[kind], args.processes, args.rounds, args.steps, options)
        rows += [{"comparison": kind, **row} for row in timed]
        print_table(f"{kind}, {args.processes} processes, {args.precision}; quartiles over rounds", TIMES, timed)
    if not args.no_contracts:
        with tempfile.TemporaryDirectory(prefix="sansgpu-engines-") as folder:
            losses, state = reference(Path(folder), options)
            names = [name for kind in args.comparisons for name in COMPARISONS[kind]]
            held = [
                row_of(name, partial(check_contracts, name, args.processes, losses, state, options)) for name in names
            ]
        print_table(f"contracts, {args.processes} processes; errors against one process", CONTRACTS, held)
        rows += [{"comparison": "contracts", **row} for row in held]
    write_json(args.json, "engines", vars(args), rows)


if __name__ == "__main__":
    main()

"""Projects the speed of a training step on many cores from measurements on a few cores.

    python -m benchmarks.critical_path --size cpu_small --threads 2,16,64
    python -m benchmarks.critical_path --threads 2 --check

A step takes at least as long as its critical path: the code that runs only in the main thread, plus the slowest thread
of every parallel region. The projected speedup is the CPU time of a step with one thread, divided by the length of the
critical path.

torch's operations divide their work among threads in advance, so the step runs with that number of threads, and the CPU
time of each thread is measured, whatever the number of cores. In sansgpu's kernels, threads take units of work
dynamically: here the units run one after another, and a simulation assigns them to threads.

The projection ignores shared memory bandwidth, lower clock rates with many busy cores, the distance between sockets,
the time to start and join the threads of a region (the table has the number of regions), and units that wait for
others. Needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ours
from benchmarks.contest import ROOT, NoResultError, Row, print_table, say, spawn, write_json
from benchmarks.corpus import PYTHON_STDLIB
from benchmarks.fine_tuning import trainer
from benchmarks.sizes import SIZES
from benchmarks.speed.peers import settings_of
from sansgpu.machine.launch import SPINS

ADAPTERS = {"qwen_lora": "lora", "qwen_whole": "none"}  # one packed row of 2,048 tokens, Qwen2.5-0.5B's shape
PACKED_TOKENS = 2048
CHECKED_THREADS = 2
SHOWN = 20  # maximum operations in a table
SUMMARY = {
    "threads": ("name", "s"),
    "work s": ("work_seconds", ".3f"),
    "longest path s": ("longest_path_seconds", ".3f"),
    "serial s": ("serial_seconds", ".3f"),
    "regions": ("regions", ",d"),
    "projected speed-up": ("projected_speedup", ".2f"),
    "measured speed-up": ("measured_speedup", ".2f"),
}
OPERATIONS = {
    "operation": ("name", "s"),
    "of the path": ("share", ".1%"),
    "path ms": ("path_ms", ".2f"),
    "serial ms": ("serial_ms", ".2f"),
    "one thread ms": ("one_thread_ms", ".2f"),
    "speed-up": ("speedup", ".1f"),
}


@dataclass(frozen=True)
class PathJob:
    """The job of the worker: which steps to run, and how often."""

    config: str | None  # path of the configuration file
    overrides: list[str]
    threads: list[int]  # measured alternately
    steps: int  # per number of threads
    recorder: str | None = None  # preloaded library of openmp_regions.c; None: only the wall time is measured

    @staticmethod
    def read(file: Path) -> PathJob:
        return PathJob(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return file


def settings(size: str, folder: Path) -> tuple[str | None, dict[str, object]]:
    """Returns the configuration file and the settings of a size. Makes the model to fine-tune in `folder`."""
    if size in SIZES:
        shape = SIZES[size]
        batch = {"training.batch_size": shape.windows_a_step, "training.gradient_accumulation_steps": 1}
        return None, {**ours.MEASURED, **settings_of(shape, PYTHON_STDLIB), **batch}
    if size in ADAPTERS:
        model, row = trainer.made_model(folder / "model"), {"data.max_length": PACKED_TOKENS}
        given = trainer.settings(model, folder, ADAPTERS[size], **row, **{"training.batch_size": 1})
        return None, {key: value for key, value in given.items() if key != "training.window_warmup_ratio"}
    return str(ROOT / "configs" / f"{size}.yaml"), ours.MEASURED


def compile_recorder(folder: Path) -> str:
    """Compiles openmp_regions.c and returns the path of the library. Raises NoResultError if that fails."""
    library, compiler = folder / "openmp_regions.so", shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoResultError("there is no C compiler; install gcc")
    source = Path(__file__).with_name("openmp_regions.c")
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoResultError(f"{source.name} cannot be compiled: {' '.join(done.stderr.split())[-300:]}")
    return str(library)


def run_job(job: PathJob, folder: Path) -> dict[int, Row]:
    """Runs the steps of a job in a new process; returns results by thread count. Raises NoResultError if it fails."""
    say(f"{'recording' if job.recorder else 'timing'} {job.steps} steps each with threads: {job.threads}")
    environment = {"GOMP_SPINCOUNT": str(SPINS)}
    if job.recorder:  # waiting threads sleep, so that they use no CPU time
        environment = {"LD_PRELOAD": job.recorder, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    line = [sys.executable, "-m", "benchmarks.critical_path_worker", str(job.write(folder / "job.json"))]
    outcome = spawn(line, environment={**environment, "OMP_DYNAMIC": "FALSE"})
    if outcome.code:
        raise outcome.no_result()
    return {result["threads"]: result for _, result in outcome.named("result")}


def project(one: Row, many: Row) -> Row:
    """Returns the projection from the results with one thread and with many."""
    work = {name: seconds["serial"] + seconds["longest"] for name, seconds in one["operations"].items()}
    # A main thread that slept during a region finds cold caches, which makes its work appear slower.
    serial = {n: min(seconds["serial"], work.get(n, 0.0)) for n, seconds in many["operations"].items()}
    path = {name: serial[name] + seconds["longest"] for name, seconds in many["operations"].items()}
    total = sum(path.values())
    return {
        "name": str(many["threads"]),
        "threads": many["threads"],
        "work_seconds": sum(work.values()),
        "longest_path_seconds": total,
        "projected_speedup": sum(work.values()) / total,
        "serial_seconds": sum(serial.values()),
        "regions": sum(seconds["regions"] for seconds in many["operations"].values()),
        "serial_regions": [{"name": name, "seconds": serial[name]} for name in longest_first(serial)],
        "operations": [
            {
                "name": name,
                "share": path[name] / total,
                "path_ms": path[name] * 1e3,
                "serial_ms": serial[name] * 1e3,
                "one_thread_ms": work.get(name, 0.0) * 1e3,
                "speedup": work.get(name, 0.0) / path[name] if path[name] > 0 else None,
            }
            for name in longest_first(path)
        ],
    }


def longest_first(seconds: dict[str, float]) -> list[str]:
    return sorted(seconds, key=lambda name: -seconds[name])


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.critical_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=[*SIZES, "nano", *ADAPTERS], default="cpu_small")
    parser.add_argument("--threads", default="16", help="comma-separated numbers of threads (%(default)s)")
    parser.add_argument(
        "--steps", type=int, help="measured steps per number of threads (5; qwen_lora and qwen_whole: 2)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a run setting; repeatable")
    parser.add_argument("--check", action="store_true", help=f"also measure the speedup with {CHECKED_THREADS} threads")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    try:
        args.threads = [int(number) for number in args.threads.split(",")]
    except ValueError:
        parser.error(f"--threads {args.threads}: give numbers such as 2,16,64")
    if args.check and CHECKED_THREADS not in args.threads:
        args.threads.insert(0, CHECKED_THREADS)
    if args.steps is None:
        args.steps = 2 if args.size in ADAPTERS else 5  # their steps take 20 seconds each
    if args.steps < 1 or min(args.threads) < 1:
        parser.error("--steps and --threads must be at least 1")
    if sys.platform != "linux":
        parser.error("the CPU time of threads is only recorded on Linux")
    return args


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Returns a projection for each number of threads. Raises NoResultError if the steps cannot be run."""
    config, given = settings(args.size, folder)
    overrides = [*(f"{key}={value}" for key, value in given.items()), *args.set]
    results = run_job(PathJob(config, overrides, [1, *args.threads], args.steps, compile_recorder(folder)), folder)
    rows = [project(results[1], results[threads]) for threads in args.threads]
    if args.check:
        timed = run_job(PathJob(config, overrides, [1, CHECKED_THREADS], args.steps), folder)
        seconds = {threads: min(result["step_seconds"]) for threads, result in timed.items()}
        row = next(row for row in rows if row["threads"] == CHECKED_THREADS)
        row["measured_speedup"] = seconds[1] / seconds[CHECKED_THREADS]
    return rows


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="sansgpu-critical-path-") as name:
        try:
            rows = measure(args, Path(name))
        except NoResultError as failure:
            sys.exit(f"critical_path: {failure}")
    for row in rows:
        print_table(f"{args.size}, {row['name']} threads: critical path", OPERATIONS, row["operations"][:SHOWN])
    print_table(f"{args.size}, shortest time of each operation in {args.steps} steps", SUMMARY, rows)
    write_json(args.json, "critical_path", vars(args), rows, rows[-1])


if __name__ == "__main__":
    main()

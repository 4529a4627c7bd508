"""Runs the steps for `benchmarks.critical_path` in a separate process: `python -m benchmarks.critical_path_worker JOB`.

Prints a JSON line per number of threads.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.contest import WARM_UP, Row
from benchmarks.critical_path import PathJob
from sansgpu.kernels import library
from sansgpu.machine.launch import quiet_profiler
from sansgpu.planning.process import configure_process
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step

MAX_REGIONS, MAX_UNITS = 200_000, 4_000_000  # parallel regions and units of work that can be recorded in a step
REGION = np.dtype([(name, np.int64) for name in ("start_ns", "end_ns", "caller_ns", "longest_ns", "work_ns", "alone")])
BETWEEN = "Python between operations"  # name for the time of a step in which no operation runs
AUTOGRAD = "autograd::engine::evaluate_function: "  # prefix of the names of the engine's events


@dataclass
class Seconds:
    """The time of one operation in a step."""

    serial: float = 0.0  # seconds outside parallel regions
    longest: float = 0.0  # sum over parallel regions of the CPU seconds of the slowest thread
    regions: int = 0


class RegionRecorder:
    """Records the parallel regions of a step, and the units of work of sansgpu's kernels."""

    def __init__(self, recorder: str) -> None:
        self._library = ctypes.CDLL(recorder)
        self._kernels = str(library.LIBRARIES).encode()
        self._regions = np.zeros(MAX_REGIONS, REGION)
        self._units = torch.zeros(MAX_UNITS, dtype=torch.float64)

    def record(self, step: Callable[[], None]) -> tuple[np.ndarray, float]:
        """Calls `step` and returns its regions, with `longest_ns` as if each thread had its own core, and its
        serial seconds."""
        if library.available():
            library.call("record", self._units, len(self._units))
        places = ctypes.c_void_p(self._regions.ctypes.data)
        self._library.start(places, ctypes.c_int64(len(self._regions)), self._kernels)
        start = time.thread_time()
        step()
        spent = time.thread_time() - start
        regions = self._regions[: self._library.stop()].copy()
        units = self._recorded_units()
        drawn = np.flatnonzero(regions["alone"])
        if len(regions) == MAX_REGIONS or len(drawn) != len(units):
            raise RuntimeError(
                f"{len(regions)} regions, {len(drawn)} of sansgpu's kernels, but {len(units)} with recorded units; "
                "raise MAX_REGIONS or MAX_UNITS"
            )
        for number, seconds in zip(drawn, units, strict=True):
            before_units = max(0.0, regions[number]["work_ns"] / 1e9 - sum(seconds))  # outside units, in every thread
            regions[number]["longest_ns"] = (before_units + makespan(seconds, torch.get_num_threads())) * 1e9
        return regions, spent - regions["caller_ns"].sum() / 1e9

    def _recorded_units(self) -> list[list[float]]:
        """Returns the seconds of the units of each region."""
        if not library.available():
            return []
        values = self._units[: library.call("recorded")].tolist()
        library.call("record", None, 0)
        regions, place = [], 0
        while place < len(values):
            count = int(-values[place])
            regions.append(values[place + 1 : place + 1 + count])
            place += count + 1
        return regions


def makespan(units: Sequence[float], threads: int) -> float:
    """Returns the seconds until all units are done if each thread takes the next unit as soon as it is free."""
    free_at = [0.0] * threads
    for seconds in units:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    return max(free_at)


def by_operation(profiled: profile, regions: np.ndarray) -> dict[str, Seconds]:
    """Returns the times of a profiled step by the name of the innermost operation."""
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    origin = results.trace_start_ns()
    spans: list[tuple[int, int, str, np.void | None]] = []
    for event in profiled.events():
        name = "autograd engine" if event.name.startswith(AUTOGRAD) else event.name
        start, end = (origin + int(1000 * time) for time in (event.time_range.start, event.time_range.end))
        spans.append((start, end, name, None))
    spans += [(int(region["start_ns"]), int(region["end_ns"]), "", region) for region in regions]
    found: dict[str, Seconds] = defaultdict(Seconds)
    outer: list[tuple[int, str]] = []  # (end, name) of the operations that enclose a span
    for start, end, name, region in sorted(spans, key=lambda span: (span[0], -span[1])):
        while outer and outer[-1][0] <= start:
            outer.pop()
        around = outer[-1][1] if outer else BETWEEN
        found[around].serial -= (end - start) / 1e9 if outer else 0.0
        if region is not None:
            found[around].longest += region["longest_ns"] / 1e9
            found[around].regions += 1
        else:
            found[name].serial += (end - start) / 1e9
            outer.append((end, name))
    return found


def training_step(job: PathJob) -> Callable[[], None]:
    """Returns a function that runs a training step on random tokens."""
    file = None if job.config is None else Path(job.config)
    config, _ = load_config(file, [*job.overrides, f"training.threads={max(job.threads)}"])
    task_class, training = task_of(config), config.training
    config = task_class.with_vocabulary(config)
    execution, _ = configure_process(config, None, lambda message: None)
    task: Any = task_class.new_objective(config)
    assert training.batch_size != "auto"
    execution.micro_batch = training.batch_size
    state = TrainState.create(task.model, training, execution)
    batch = task_class.random_batch(config, training.batch_size * training.gradient_accumulation_steps)

    def step() -> None:
        train_step(state, task, batch, training.learning_rate / 10)
        state.progress.step += 1

    return step


def timed(step: Callable[[], None], job: PathJob) -> Iterator[Row]:
    """Times steps with each number of threads in turn."""
    taken: dict[int, list[float]] = {threads: [] for threads in job.threads}
    for _ in range(WARM_UP + job.steps):
        for threads, seconds in taken.items():
            torch.set_num_threads(threads)
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    for threads, seconds in taken.items():
        yield {"threads": threads, "step_seconds": seconds[WARM_UP:]}


def recorded(step: Callable[[], None], job: PathJob, recorder: RegionRecorder) -> Iterator[Row]:
    """Records steps with each number of threads in turn; yields the operations of each."""
    serial: dict[int, list[float]] = {threads: [] for threads in job.threads}
    operations: dict[int, list[dict[str, Seconds]]] = {threads: [] for threads in job.threads}
    quiet_profiler()
    for number in range(WARM_UP + job.steps):
        for threads in job.threads:
            torch.set_num_threads(threads)
            if number < WARM_UP:
                step()
                continue
            serial[threads].append(recorder.record(step)[1])
            with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(BETWEEN):
                regions, _ = recorder.record(step)
            operations[threads].append(by_operation(profiled, regions))
    for threads in job.threads:
        yield {"threads": threads, "operations": least(operations[threads], min(serial[threads]))}


def least(steps: Sequence[Mapping[str, Seconds]], serial_seconds: float) -> dict[str, Row]:
    """Returns the minimum seconds of each operation, because other programs can only increase them.

    Scales the serial times to add up to `serial_seconds`, which was measured without the profiler.
    """
    common = [name for name in steps[0] if all(name in step for step in steps)]
    found = {
        name: {key: min(asdict(step[name])[key] for step in steps) for key in asdict(Seconds())} for name in common
    }
    scale = serial_seconds / sum(seconds["serial"] for seconds in found.values())
    for seconds in found.values():
        seconds["serial"] *= scale
    return found


def main() -> None:
    os.environ.pop("LD_PRELOAD", None)  # compilers must run without the recorder
    job = PathJob.read(Path(sys.argv[1]))
    step = training_step(job)
    results = recorded(step, job, RegionRecorder(job.recorder)) if job.recorder else timed(step, job)
    for result in results:
        print(json.dumps({"event": "result", **result}), flush=True)


if __name__ == "__main__":
    main()

"""Runs contestants alternately in separate processes, and reports medians, ratios, tables and JSON.

This process must not import torch: on Linux a child's reported peak memory includes its parent's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
WARM_UP = 2  # unmeasured first steps, which include compilation and first memory accesses
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve")
PACKAGES = ("sansgpu", "torch", "transformers", "accelerate", "lightning", "numpy")

Row = dict[str, Any]
Event = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The output and resource use of a process."""

    code: int
    wall_seconds: float
    peak_rss_bytes: int  # the maximum over the process and its children
    cpu_seconds: float  # the sum over the process and its children
    events: list[tuple[float, Event]]  # JSON lines of stdout with the seconds since the start
    lines: list[tuple[float, str]]  # other lines of stdout with the seconds since the start
    errors: str  # the end of stderr

    def named(self, event: str) -> list[tuple[float, Event]]:
        """Returns the events of one kind."""
        return [(seconds, line) for seconds, line in self.events if line.get("event") == event]

    def no_result(self) -> NoResultError:
        """Returns the error for a process that exited too early."""
        return NoResultError(f"exit code {self.code}: {' '.join(self.errors.split())[-300:]}")


@dataclass(frozen=True)
class Sample:
    """The measurements of the steps of one process."""

    step_seconds: list[float]  # after the warm-up
    first_step_seconds: float
    peak_rss_bytes: int
    loss: float | None
    wall_seconds: float


@dataclass(frozen=True)
class Contestant:
    """A command to measure. Of several variants with one name, only the fastest continues after the first round."""

    name: str
    command: list[str]
    read: Callable[[Outcome], Sample]
    variant: str = ""
    needs: tuple[str, ...] = ()  # required packages
    until: Callable[[Event], bool] | None = None  # returns True for the event after which to stop the process
    environment: dict[str, str] = field(default_factory=dict)
    beside: Callable[[], AbstractContextManager[None]] = nullcontext  # a context entered while the process runs


class NoResultError(Exception):
    """Raised with the reason if a contestant has no result."""


def row_of(name: str, measure: Callable[[], Row]) -> Row:
    """Returns the row of `measure`, or a row with the reason of its NoResultError."""
    try:
        return measure()
    except NoResultError as failure:
        return {"name": name, "status": str(failure)}


def say(message: str) -> None:
    """Prints progress to stderr, because stdout is for results."""
    print(message, file=sys.stderr, flush=True)


def spawn(
    command: Sequence[str],
    until: Callable[[Event], bool] | None = None,
    environment: dict[str, str] | None = None,
    cwd: Path = ROOT,
) -> Outcome:
    """Runs a command to its end, or kills it after it prints an event that `until` accepts."""
    events: list[tuple[float, Event]] = []
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that its child processes can be killed with it
        )
        stopped = False
        try:
            assert process.stdout is not None
            for line in process.stdout:
                seconds = time.monotonic() - start
                event = _event(line)
                if event is None:
                    lines.append((seconds, line.rstrip("\n")))
                    continue
                events.append((seconds, event))
                if until is not None and not stopped and until(event):
                    stopped = True
                    os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = 0 if stopped else os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        wall = time.monotonic() - start
        errors.seek(0)
        tail = errors.read()[-4000:]
    kilo = 1 if sys.platform == "darwin" else 1024
    cpu = usage.ru_utime + usage.ru_stime
    return Outcome(process.returncode, wall, usage.ru_maxrss * kilo, cpu, events, lines, tail)


def finished(command: Sequence[str], event: str, environment: dict[str, str] | None = None) -> Outcome:
    """Runs a command to its end. Raises NoResultError if it fails or does not print the event."""
    outcome = spawn(command, environment=environment)
    if outcome.code or not outcome.named(event):
        raise outcome.no_result()
    return outcome


def run_worker(
    job: Row, folder: Path, *module: str, event: str = "result", python: str | Path = sys.executable
) -> Outcome:
    """Runs `python -m MODULE FILE` with the job in a new file of `folder`.

    Raises NoResultError if it fails or does not print the event.
    """
    file = folder / "job.json"
    file.write_text(json.dumps(job, default=str), encoding="utf-8")
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}  # sansgpu may be missing in the other environment
    return finished([str(python), "-m", *module, str(file)], event, paths)


def read_job() -> Row:
    """Returns the job that `run_worker` has written, in the process that it has started."""
    job: Row = json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8"))
    return job


def run(contestant: Contestant) -> Sample:
    """Runs a contestant once. Raises NoResultError if it fails."""
    missing = [name for name in contestant.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise NoResultError(f"not installed: {', '.join(missing)}")
    with contestant.beside():
        outcome = spawn(contestant.command, contestant.until, contestant.environment)
    if outcome.code:
        last = outcome.errors.strip().splitlines()
        raise NoResultError(f"exit code {outcome.code}: {last[-1] if last else 'nothing on stderr'}")
    return contestant.read(outcome)


def take_turns(contestants: Sequence[Contestant], rounds: int) -> list[Row]:
    """Runs every contestant once per round, so that other load on the machine affects all equally. Returns a row per
    name."""
    field = list(contestants)
    samples: dict[tuple[str, str], list[Sample]] = {}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for contestant in field:
            key = (contestant.name, contestant.variant)
            say(f"round {number + 1} of {rounds}: {' '.join(part for part in key if part)}")
            try:
                samples.setdefault(key, []).append(run(contestant))
            except NoResultError as failure:
                failures[contestant.name] = str(failure)
                say(f"  {failure}")
        best = {c.name: _best_variant(c.name, samples) for c in field}
        field = [c for c in field if best[c.name] == c.variant]  # failed contestants do not run again
    names = dict.fromkeys(c.name for c in contestants)
    return [_row(name, samples, failures.get(name)) for name in names]


def _best_variant(name: str, samples: dict[tuple[str, str], list[Sample]]) -> str | None:
    """Returns the fastest of the variants with the most runs, or None if none ran."""
    tried = {variant: runs for (of, variant), runs in samples.items() if of == name and runs}
    return min(tried, key=lambda variant: (-len(tried[variant]), _median_step(tried[variant])), default=None)


def _median_step(runs: list[Sample]) -> float:
    return median(seconds for run in runs for seconds in run.step_seconds)


def _row(name: str, samples: dict[tuple[str, str], list[Sample]], failure: str | None) -> Row:
    variant = _best_variant(name, samples)
    if variant is None:
        return {"name": name, "status": failure or "did not run"}
    runs = samples[name, variant]
    return {
        "name": name,
        "status": "measured",
        "failure": failure,  # why another variant or a later round failed
        "variant": variant,
        "median_step_seconds": _median_step(runs),
        "first_step_seconds": runs[0].first_step_seconds,  # in the first round nothing is cached yet
        "peak_rss_bytes": max(run.peak_rss_bytes for run in runs),
        "loss": runs[-1].loss,
        "runs": [
            {"variant": of, **asdict(run)} for (named, of), tried in samples.items() if named == name for run in tried
        ],
    }


def add_ratios(rows: list[Row], key: str, to: str, name: str = "ratio") -> None:
    """Sets `name` of every measured row to its `key` divided by that of the row named `to`."""
    base = next((row[key] for row in rows if row["name"] == to and key in row), None)
    for row in rows:
        if base and key in row:
            row[name] = row[key] / base


def print_table(title: str, columns: dict[str, tuple[str, str]], rows: Sequence[Row]) -> None:
    """Prints one line per row; `columns` maps headers to (key, format). Rows without a result show their status."""
    table = Table(title=title, title_justify="left")
    for number, header in enumerate(columns):
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        cells = [format(row[key], form) if row.get(key) is not None else "" for key, form in columns.values()]
        if row.get("status", "measured") != "measured":
            cells[1] = row["status"]
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 140, markup=False).print(table)


def write_json(path: Path | None, benchmark: str, settings: Row, rows: Sequence[Row], more: Row | None = None) -> None:
    """Writes the results with the settings and the machine, so that they can be reproduced; `more` adds keys."""
    if path is None:
        return
    known = {"benchmark": benchmark, "settings": settings, "machine": describe_machine(), "rows": list(rows)}
    result = {**(more or {}), **known}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    say(f"written to {path}")


def describe_machine() -> Row:
    """Returns processor, instruction set of our kernels, memory, load and versions."""
    from sansgpu.machine.instruction_sets import allowed  # imports torch, which this process does not need otherwise

    return {
        "processor": _cpu_line("model name") or platform.processor() or platform.machine(),
        "isa": [flag for flag in ISA_FLAGS if flag in (_cpu_line("flags") or _cpu_line("Features") or "").split()],
        "instruction_set": allowed()[-1].name,
        "cores": psutil.cpu_count(logical=False),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_line(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == key), None)


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None

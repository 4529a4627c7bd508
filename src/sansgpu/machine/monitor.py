"""Samples the resource use of the run and its machine in a background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from sansgpu.machine import cgroup
from sansgpu.machine.description import energy_joules
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.peers import Peer
from sansgpu.machine.probe import available_memory, held_memory, total_memory
from sansgpu.machine.usage import LoadMeter

SECONDS = 1.0  # sampling interval; a sample takes a millisecond
_CPU = torch.device("cpu")

System = dict[str, Any]  # keys as in `Monitor.latest`; None for values that this machine does not provide


class Monitor:
    """Samples the process and the machine until it is stopped."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._latest: System | None = None
        self._samples: list[System] = []  # since the last call of `mean`
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, peers: Sequence[Peer] = ()) -> None:
        """Starts sampling the disk of `folder` and the run's local processes `peers`."""
        self._thread = threading.Thread(target=self._run, args=(folder, peers), name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def latest(self) -> System | None:
        """Returns the last sample, over one sampling interval, or None before the first.

        Keys: cpu_percent of the run's local processes (100 per core), core_percent (a list with one value per core),
        other_percent of other programs and stolen_percent of the host (100 per core), rss_bytes,
        memory_available_bytes, memory_limit_bytes, swap_bytes, major_faults_per_second, minor_faults_per_second,
        disk_read_bytes_per_second, disk_write_bytes_per_second, disk_free_bytes, throttled (thermal events),
        withheld_percent (of the time, by the container's CPU quota), temperature_celsius, frequency_hz, watts.
        """
        return self._latest

    def mean(self) -> System | None:
        """Returns the aggregate of the samples since the last call, or the last sample if there are no new ones."""
        with self._lock:
            samples, self._samples = self._samples, []
        return mean_of(samples) if samples else self._latest

    def _run(self, folder: Path, peers: Sequence[Peer]) -> None:
        before = _Moment(folder, peers)
        while not self._stopped.wait(self._seconds):
            now = _Moment(folder, peers)
            sample = now.since(before)
            before = now
            with self._lock:
                self._latest = sample
                self._samples.append(sample)


def mean_of(samples: Sequence[System]) -> System:
    """Aggregates samples per key, ignoring None: means, except for sums, extrema and last values of some keys."""
    return {key: _aggregate(key, [s[key] for s in samples if s[key] is not None]) for key in samples[-1]}


def _aggregate(key: str, values: list[Any]) -> Any:
    if not values:
        return None
    if key == "throttled":
        return sum(values)
    if key in ("memory_limit_bytes", "disk_free_bytes"):
        return values[-1]
    if key == "memory_available_bytes":
        return min(values)
    if key in ("rss_bytes", "swap_bytes"):
        return max(values)
    if isinstance(values[0], list):
        return [sum(column) / len(column) for column in zip(*values, strict=True)]
    return sum(values) / len(values)


class _Moment:
    """The values of all counters at the time of construction."""

    def __init__(self, folder: Path, peers: Sequence[Peer]) -> None:
        self._at, self._folder = time.perf_counter(), folder
        self._load = LoadMeter(children=False, peers=peers)
        self._cores = _try(lambda: psutil.cpu_times(percpu=True)) or []
        major, minor = _try(_faults) or (None, None)
        read, written = _try(lambda: psutil.Process().io_counters()[2:4]) or (None, None)
        self._counts: dict[str, float | None] = {
            "major_faults_per_second": major,
            "minor_faults_per_second": minor,
            "disk_read_bytes_per_second": read,
            "disk_write_bytes_per_second": written,
            "watts": energy_joules(),
            "withheld": cgroup.throttled_seconds(),
        }

    def since(self, before: _Moment) -> System:
        """Returns a sample of the interval between two moments."""
        seen, wall = before._load.sample(), self._at - before._at
        rates = {key: _rate(now, before._counts[key], wall) for key, now in self._counts.items()}
        withheld, folder = rates.pop("withheld"), self._folder
        return {
            "cpu_percent": 100 * seen["own_cores"],
            "core_percent": [_busy(now, then) for now, then in zip(self._cores, before._cores, strict=False)],
            "other_percent": 100 * seen["other_cores"],
            "stolen_percent": 100 * seen["stolen_cores"],
            "rss_bytes": held_memory(_CPU),
            "memory_available_bytes": available_memory(_CPU),
            "memory_limit_bytes": total_memory(),
            "swap_bytes": _try(lambda: psutil.swap_memory().used),
            **rates,
            "disk_free_bytes": _try(lambda: free_disk_bytes(folder)),
            "throttled": seen["throttled"],
            "withheld_percent": None if withheld is None else 100 * withheld,
            "temperature_celsius": seen["temperature_celsius"],
            "frequency_hz": seen["frequency_hz"][1],
        }


def _rate(now: float | None, before: float | None, seconds: float) -> float | None:
    """Returns the increase per second, or None if a value is missing or the counter was reset."""
    return None if now is None or before is None or now < before else (now - before) / seconds


def _faults() -> tuple[int, int]:
    """Returns the major and minor page faults of this process."""
    import resource  # not on Windows

    counts = resource.getrusage(resource.RUSAGE_SELF)
    return counts.ru_majflt, counts.ru_minflt


def _busy(now: Any, then: Any) -> float:
    """Returns the percentage of the interval in which a core was not idle."""
    idle = sum(getattr(now, name, 0.0) - getattr(then, name, 0.0) for name in ("idle", "iowait"))
    shared = ("guest", "guest_nice")  # already included in user and nice
    interval = sum(getattr(now, f) - getattr(then, f) for f in now._fields if f not in shared)
    return min(100.0, max(0.0, 100 * (1 - idle / interval))) if interval > 0 else 0.0


def _try(read: Callable[[], Any]) -> Any:
    """Returns the result of `read`, or None if this machine does not provide it."""
    try:
        return read()
    except (OSError, AttributeError, ImportError, NotImplementedError, RuntimeError, psutil.Error):
        return None

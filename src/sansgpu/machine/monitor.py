"""What a run asks of its machine, looked at once a second by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from sansgpu.machine import cgroup
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.inspect import energy_joules
from sansgpu.machine.peers import Peer
from sansgpu.machine.probe import available_memory, held_memory, total_memory
from sansgpu.machine.usage import Strain

SECONDS = 1.0  # between two looks, which take a millisecond
_CPU = torch.device("cpu")

System = dict[str, Any]  # by the names of `Monitor.latest`; None for what this machine does not tell


class Monitor:
    """Samples the process and the machine until it is stopped."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._latest: System | None = None
        self._since: list[System] = []  # the last `mean`
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, peers: Sequence[Peer] = ()) -> None:
        """Begin to look; `folder` is on the disk whose free space is told, `peers` are the run's processes here."""
        self._thread = threading.Thread(target=self._run, args=(folder, peers), name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def latest(self) -> System | None:
        """The last sample: of the second before it.

        cpu_percent of the run's processes here (100 a core), core_percent of each core, other_percent and
        stolen_percent (100 a core), rss_bytes, memory_available_bytes, memory_limit_bytes, swap_bytes,
        major_faults_per_second, minor_faults_per_second, disk_read_bytes_per_second, disk_write_bytes_per_second,
        disk_free_bytes, throttled (times, for heat), withheld_percent (of the time, by the container's limit),
        temperature_celsius, frequency_hz, watts.
        """
        return self._latest

    def mean(self) -> System | None:
        """The samples since this was last asked for, as their mean; the last one where there were none."""
        with self._lock:
            samples, self._since = self._since, []
        return mean_of(samples) if samples else self._latest

    def _run(self, folder: Path, peers: Sequence[Peer]) -> None:
        before = _Moment(folder, peers)
        while not self._stopped.wait(self._seconds):
            now = _Moment(folder, peers)
            sample = now.since(before)
            before = now
            with self._lock:
                self._latest = sample
                self._since.append(sample)


def mean_of(samples: Sequence[System]) -> System:
    """Each value's mean over the samples that have one; what counts events is added up, what is left is the last."""
    return {key: _together(key, [s[key] for s in samples if s[key] is not None]) for key in samples[-1]}


def _together(key: str, values: list[Any]) -> Any:
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
    """Counters as they stand now."""

    def __init__(self, folder: Path, peers: Sequence[Peer]) -> None:
        self._at, self._folder = time.perf_counter(), folder
        self._strain = Strain(children=False, peers=peers)
        self._cores = _told(lambda: psutil.cpu_times(percpu=True)) or []
        major, minor = _told(_faults) or (None, None)
        read, written = _told(lambda: psutil.Process().io_counters()[2:4]) or (None, None)
        self._counts: dict[str, float | None] = {
            "major_faults_per_second": major,
            "minor_faults_per_second": minor,
            "disk_read_bytes_per_second": read,
            "disk_write_bytes_per_second": written,
            "watts": energy_joules(),
            "withheld": cgroup.throttled_seconds(),
        }

    def since(self, before: _Moment) -> System:
        """A sample of the time between two moments."""
        seen, wall = before._strain.seen(), self._at - before._at
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
            "swap_bytes": _told(lambda: psutil.swap_memory().used),
            **rates,
            "disk_free_bytes": _told(lambda: free_disk_bytes(folder)),
            "throttled": seen["throttled"],
            "withheld_percent": None if withheld is None else 100 * withheld,
            "temperature_celsius": seen["temperature_celsius"],
            "frequency_hz": seen["frequency_hz"][1],
        }


def _rate(now: float | None, before: float | None, seconds: float) -> float | None:
    """What was added in each second; None where it is not told, or the counter began anew."""
    return None if now is None or before is None or now < before else (now - before) / seconds


def _faults() -> tuple[int, int]:
    """Major and minor page faults of this process so far."""
    import resource  # not on Windows

    counts = resource.getrusage(resource.RUSAGE_SELF)
    return counts.ru_majflt, counts.ru_minflt


def _busy(now: Any, then: Any) -> float:
    """Percent of the time between that a core was not idle."""
    idle = sum(getattr(now, name, 0.0) - getattr(then, name, 0.0) for name in ("idle", "iowait"))
    shared = ("guest", "guest_nice")  # which user and nice count already
    whole = sum(getattr(now, f) - getattr(then, f) for f in now._fields if f not in shared)
    return min(100.0, max(0.0, 100 * (1 - idle / whole))) if whole > 0 else 0.0


def _told(read: Callable[[], Any]) -> Any:
    """What `read` returns, or None where this machine does not tell it."""
    try:
        return read()
    except (OSError, AttributeError, ImportError, NotImplementedError, RuntimeError, psutil.Error):
        return None

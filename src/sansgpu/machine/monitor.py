"""The use of memory, processors and other resources by this process, the run and other programs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from sansgpu.machine import cgroup
from sansgpu.machine.description import energy_joules, frequency_hz, temperature_celsius, throttled
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.distributed.peers import Peer
from sansgpu.machine.distributed.world import allowed_cpus
from sansgpu.machine.probe import available_memory, held_memory, total_memory

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


class LoadMeter:
    """Measures the load of this process, other programs and the host since its construction.

    The run's processes `peers` on this machine do not count as other programs, nor do child processes if `children` is
    set, which takes a millisecond or more.
    """

    def __init__(self, children: bool = True, peers: Sequence[Peer] = ()) -> None:
        self._process, self._children = psutil.Process(), children
        self._peers = [peer for peer in peers if peer.pid != self._process.pid]
        self._start, self._own, self._machine = time.perf_counter(), self._own_seconds(), psutil.cpu_times()
        self._throttled, self._frequency = throttled(), frequency_hz()

    def sample(self) -> dict[str, Any]:
        """Returns CPU use in cores (own, others, stolen by the host), frequencies and heat; None if unreadable."""
        wall, now = time.perf_counter() - self._start, psutil.cpu_times()

        def passed(name: str) -> float:
            return float(getattr(now, name, 0.0) - getattr(self._machine, name, 0.0))

        own = (self._own_seconds() - self._own) / wall
        busy = sum(passed(name) for name in ("user", "nice", "system", "irq", "softirq")) / wall
        throttles = throttled()
        usable = min(usable_cpus(self._peers), cgroup.cpu_quota() or float("inf"))
        return {
            "own_cores": own,
            # Load on cores that this process may not use does not count.
            "other_cores": max(0.0, busy - own - max(0.0, (psutil.cpu_count() or 1) - usable)),
            "stolen_cores": passed("steal") / wall,
            "frequency_hz": [self._frequency, frequency_hz()],
            "temperature_celsius": temperature_celsius(),
            "throttled": None if throttles is None or self._throttled is None else throttles - self._throttled,
        }

    def _own_seconds(self) -> float:
        """Returns the CPU seconds of this process, its children and its peers."""
        seconds = 0.0
        children = self._process.children(recursive=True) if self._children else []
        for pid in (self._process.pid, *(child.pid for child in children), *(peer.pid for peer in self._peers)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = psutil.Process(pid).cpu_times()
                seconds += times.user + times.system
                seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return seconds


def usable_cpus(peers: Sequence[Peer]) -> int:
    """Returns the number of this machine's processors that this process and the run's other processes here may use."""
    return len({cpu for peer in peers for cpu in peer.cpus}.union(allowed_cpus()))


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process; without /proc, a forked child's includes its parent's."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        import resource  # not on Windows

        kilo = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo


def process_age() -> float:
    """Returns the seconds since this process started."""
    return max(0.0, time.time() - psutil.Process().create_time())

"""CPU and memory use of this process, and the load of other programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from sansgpu.machine import cgroup, cores
from sansgpu.machine.description import frequency_hz, temperature_celsius, throttled
from sansgpu.machine.peers import Peer
from sansgpu.machine.probe import allowed_cpus


class Usage:
    """Memory and CPU use of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def rss_bytes(self) -> int:
        resident: int = self._process.memory_info().rss
        return resident

    def cpu_percent(self) -> float:
        """Returns the CPU use since the last call, 100 per busy core."""
        percent: float = self._process.cpu_percent()
        return percent


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
    theirs = {cpu for peer in peers for cpu in peer.cpus}
    return len(theirs | {cpu.number for cpu in cores.cpus()}) if theirs else allowed_cpus()


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

"""The limits of the container this process runs in: cgroup v2, v1, or both at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sansgpu.machine.kernel_files import kernel_number, kernel_text

ROOT = Path("/sys/fs/cgroup")
_PROGRAM_CACHE_BYTES = 512 << 20  # active page cache that holds program code, slow to reload
_NO_LIMIT = 1 << 60  # without a limit, version 1 reports a number near 2^63


def available_memory(root: Path = ROOT, process: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the bytes left before this process reaches a limit of its group or a parent group; None without a limit.

    Page cache does not count as used, because the kernel drops it first, except for the code of running programs.
    """
    left = [limit - used for limit, used in _memory(root, process)]
    return max(0, min(left)) if left else None


def memory_limit(root: Path = ROOT, process: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the tightest memory limit in bytes, or None."""
    return min((limit for limit, _ in _memory(root, process)), default=None)


def cpu_quota(root: Path = ROOT, process: Path = Path("/proc/self/cgroup")) -> float | None:
    """Returns the CPU time this process may use in cores, or None without a limit."""
    quotas = []
    for folder in _folders(root, process, "cpu"):
        period = kernel_number(folder / "cpu.cfs_period_us")
        quota = kernel_number(folder / "cpu.cfs_quota_us")
        both = kernel_text(folder / "cpu.max").split()
        if len(both) == 2 and both[0] != "max":
            quotas.append(float(both[0]) / float(both[1]))
        elif quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def throttled_seconds(root: Path = ROOT, process: Path = Path("/proc/self/cgroup")) -> float | None:
    """Returns the total seconds for which the CPU quota paused this process, or None if it is not reported."""
    found = []
    for folder in _folders(root, process, "cpu"):
        counts = _counts(folder / "cpu.stat")
        if "throttled_usec" in counts:
            found.append(counts["throttled_usec"] / 1e6)
        elif "throttled_time" in counts:
            found.append(counts["throttled_time"] / 1e9)
    return max(found, default=None)


def _memory(root: Path, process: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use without page cache) of every group with a limit."""
    for folder in _folders(root, process, "memory"):
        limit = kernel_number(folder / "memory.max") or kernel_number(folder / "memory.limit_in_bytes")
        used = kernel_number(folder / "memory.current") or kernel_number(folder / "memory.usage_in_bytes") or 0
        if limit and limit < _NO_LIMIT:
            counts = _counts(folder / "memory.stat")
            idle, active = (
                counts.get(f"total_{state}_file", counts.get(f"{state}_file", 0)) for state in ("inactive", "active")
            )
            yield limit, max(0, used - idle - max(0, active - _PROGRAM_CACHE_BYTES))


def _folders(root: Path, process: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of the process's group and its parent groups, for the version 1 controller and version 2."""
    for line in kernel_text(process).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tops = [root / controllers, root / controller] if controllers else [root, root / "unified"]
        top = next((top for top in tops if top.is_dir()), None)
        if top is None:
            continue
        inside = Path(group.lstrip("/"))
        # In a container its own group is often mounted as the root, while /proc shows the path on the host.
        yield from (top / part for part in [inside, *inside.parents] if (top / part).is_dir())


def _counts(path: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number in each line."""
    pairs = (line.split() for line in kernel_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}

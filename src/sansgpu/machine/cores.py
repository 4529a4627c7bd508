"""The processors of this machine, and how the processes on it share them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_SYS = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Cpu:
    """A logical processor, ordered so that neighbours share as much as they can: memory, then a core."""

    node: int  # of NUMA
    package: int
    core: int
    number: int


def cpus(root: Path = _SYS) -> list[Cpu]:
    """Those this process may run on; without a kernel that tells, each is a core of one node."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in (root / "node").glob("node[0-9]*")
        for number in listed(_read(folder / "cpulist"))
    }
    return sorted(
        Cpu(
            nodes.get(number, 0),
            _number(root / f"cpu/cpu{number}/topology/physical_package_id", 0),
            _number(root / f"cpu/cpu{number}/topology/core_id", number),
            number,
        )
        for number in allowed
    )


def physical(of: list[Cpu]) -> list[list[Cpu]]:
    """By core, each with its hardware threads."""
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in of:
        cores.setdefault((cpu.node, cpu.package, cpu.core), []).append(cpu)
    return list(cores.values())


def share(of: list[Cpu], index: int, parts: int) -> list[Cpu]:
    """Part `index` of `parts`: whole cores that stand side by side, and of fewer cores than parts one."""
    cores = physical(of)
    if parts > len(cores):
        return cores[index % len(cores)]
    start, stop = index * len(cores) // parts, (index + 1) * len(cores) // parts
    return [cpu for core in cores[start:stop] for cpu in core]


def memories() -> int:
    """NUMA nodes, or sockets, among the processors this process may run on: each has memory of its own."""
    return len({(cpu.node, cpu.package) for cpu in cpus()})


def bind(to: list[Cpu]) -> None:
    """Run this process on these processors alone; the kernel then gives it their node's memory first.

    Called before anything computes: threads that run already stay where they are.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu.number for cpu in to})


def unbind() -> None:
    """Run this process on every processor that its container allows."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def listed(text: str) -> list[int]:
    """The numbers of a kernel's list: `0-3,8` is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _number(path: Path, otherwise: int) -> int:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else otherwise


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""

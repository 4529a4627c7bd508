"""The processors of this machine, and their division among the processes of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sansgpu.machine.distributed.world import allowed_cpus
from sansgpu.machine.kernel_files import kernel_number, kernel_text

_SYS = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Cpu:
    """A logical processor. Sorting places processors that share memory or a core next to each other."""

    node: int  # NUMA node
    package: int
    core: int
    number: int


def cpus(root: Path = _SYS) -> list[Cpu]:
    """Returns the processors this process may run on; without topology data, each is a core of one node."""
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in (root / "node").glob("node[0-9]*")
        for number in parse_cpu_list(kernel_text(folder / "cpulist"))
    }
    return sorted(_cpu(number, nodes.get(number, 0), root / f"cpu/cpu{number}/topology") for number in allowed_cpus())


def _cpu(number: int, node: int, topology: Path) -> Cpu:
    core = kernel_number(topology / "core_id")
    return Cpu(node, kernel_number(topology / "physical_package_id") or 0, number if core is None else core, number)


def physical_cores(cpus: list[Cpu]) -> list[list[Cpu]]:
    """Groups logical processors by physical core."""
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in cpus:
        cores.setdefault((cpu.node, cpu.package, cpu.core), []).append(cpu)
    return list(cores.values())


def partition(cpus: list[Cpu], index: int, parts: int) -> list[Cpu]:
    """Returns part `index` of `parts`: contiguous whole cores, or one core if there are more parts than cores."""
    cores = physical_cores(cpus)
    if parts > len(cores):
        return cores[index % len(cores)]
    start, stop = index * len(cores) // parts, (index + 1) * len(cores) // parts
    return [cpu for core in cores[start:stop] for cpu in core]


def count_memory_domains() -> int:
    """Returns the number of NUMA nodes or sockets among the processors this process may run on."""
    return len({(cpu.node, cpu.package) for cpu in cpus()})


def bind(cpus: list[Cpu]) -> None:
    """Pins this process to these processors, so that the kernel prefers their node's memory.

    Call it before any computation, because threads that already run are not moved.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu.number for cpu in cpus})


def parse_cpu_list(text: str) -> list[int]:
    """Parses a kernel CPU list: `0-3,8` is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers

"""Describes this machine for `doctor`, from the kernel and torch, without measurements."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from sansgpu.machine import cgroup, instruction_sets
from sansgpu.machine.distributed.world import allowed_cpus
from sansgpu.machine.kernel_files import kernel_number, kernel_text, openmp_files
from sansgpu.machine.probe import memory_limit
from sansgpu.machine.torch_compile import cxx

_SYS = Path("/sys/devices/system")
# Flags in /proc/cpuinfo (features on ARM) that matter for matrix products.
ISA_FLAGS = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16",
    "i8mm", "sve",
)  # fmt: skip
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "scpi_sensors")
# Environment variables that keep our kernels, oneDNN, torch's operators and MKL from using all instructions.
_ISA_LIMITS = (
    instruction_sets.VARIABLE, "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)  # fmt: skip
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def hardware() -> dict[str, Any]:
    """Returns the processor, cores, NUMA nodes, instruction sets and memory sizes."""
    allowed = len(allowed_cpus())
    nodes = sorted((_SYS / "node").glob("node[0-9]*"))
    return {
        "processor": processor(),
        "cores": psutil.cpu_count(logical=False) or allowed,
        "cpus": allowed,
        "cpu_quota": cgroup.cpu_quota(),
        "numa_nodes": max(1, len(nodes)),
        "isa": isa_flags(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": memory_limit(),
        "swap_bytes": psutil.swap_memory().total,
    }


def software() -> dict[str, Any]:
    """Returns the compiler, allocator, OpenMP runtimes, torch build and relevant kernel settings."""
    return {
        "compiler": compiler(),
        "allocator": allocator(),
        "openmp": openmp(),
        "torch": str(torch.__version__),
        "torch_blas": blas(),
        "transparent_huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "governor": kernel_text(_SYS / "cpu/cpu0/cpufreq/scaling_governor") or None,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "isa_limits": {name: limit for name in _ISA_LIMITS if (limit := os.environ.get(name))},
    }


def isa_flags() -> list[str]:
    """Returns the processor's flags among ISA_FLAGS."""
    flags = (cpu_line("flags") or cpu_line("Features") or "").split()
    if not flags:  # macOS and Windows
        flags = [name for name, there in torch.cpu.get_capabilities().items() if there is True]
    return [flag for flag in ISA_FLAGS if flag in flags]


def processor() -> str:
    """Returns the processor's model name."""
    return cpu_line("model name") or platform.processor() or platform.machine()


def cpu_line(key: str) -> str | None:
    """Returns the value of a key for the first processor in /proc/cpuinfo, or None."""
    for line in kernel_text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def compiler() -> str | None:
    """Returns the first line of the C++ compiler's --version, or None without a compiler."""
    path = cxx()
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, timeout=20, check=False)
    return done.stdout.decode(errors="replace").splitlines()[0] if done.stdout else path


def allocator() -> str:
    """Returns the name of this process's C allocator: a preloaded one, or the system's libc."""
    maps = kernel_text(Path("/proc/self/maps"))
    return next((name for name in _ALLOCATORS if name in maps), platform.libc_ver()[0] or platform.system())


def openmp() -> list[str]:
    """Returns the names of the OpenMP runtimes loaded in this process; several do not coordinate their threads."""
    return sorted(file.name for file in openmp_files())


def blas() -> str:
    """Returns the matrix libraries of this torch build."""
    has = [name for name, there in (("MKL", torch.backends.mkl.is_available()),
                                    ("oneDNN", torch.backends.mkldnn.is_available())) if there]  # fmt: skip
    return " and ".join(has) or "neither MKL nor oneDNN"


def frequency_hz() -> float | None:
    """Returns the current clock frequency, or None if it cannot be read."""
    try:
        now = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return now.current * 1e6 if now and now.current else None


def temperature_celsius() -> float | None:
    """Returns the temperature of the hottest processor sensor, or None without sensors."""
    read = getattr(psutil, "sensors_temperatures", dict)
    sensors = [s.current for name, group in read().items() if name in _CPU_SENSORS for s in group if s.current]
    return max(sensors, default=None)


def energy_joules(root: Path = Path("/sys/class/powercap")) -> float | None:
    """Returns the sum of the processor packages' energy counters, or None if unreadable; the counters wrap around."""
    total = _sum_of(path / "energy_uj" for path in sorted(root.glob("intel-rapl:[0-9]")))  # AMD's too
    return None if total is None else total / 1e6


def throttled() -> int | None:
    """Returns the number of thermal throttling events since boot, or None if the kernel does not count them."""
    return _sum_of((_SYS / "cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))


def _sum_of(paths: Iterable[Path]) -> int | None:
    """Returns the sum of the numbers in these files, or None if none can be read."""
    numbers = [number for path in paths if (number := kernel_number(path)) is not None]
    return sum(numbers) if numbers else None


def _chosen(path: Path) -> str | None:
    """Returns the selected word, in brackets, of a kernel setting's list of choices."""
    found = re.search(r"\[(\w+)\]", kernel_text(path))
    return found[1] if found else None

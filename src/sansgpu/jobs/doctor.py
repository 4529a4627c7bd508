"""Describes and measures this machine, and advises how to make training faster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sansgpu.config.training import TrainingConfig
from sansgpu.events.progress import ReportProgress
from sansgpu.kernels import library
from sansgpu.kernels.matmul import INTEGERS
from sansgpu.kernels.roofline import bandwidth, peak_gemm_rate
from sansgpu.machine.cache_folder import cache_dir, private_cache
from sansgpu.machine.description import hardware, software
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.monitor import LoadMeter
from sansgpu.machine.probe import available_cores, available_memory, has_native_bf16, resolve_threads

USAGE_SECONDS = 0.5  # how long the CPU use of other programs is measured
MIN_BUSY_CORES = 0.25  # report other programs if they use more cores than this
MIN_BF16_SPEEDUP = 1.2
MIN_FREE_DISK, MIN_FREE_MEMORY = 5e9, 2e9  # bytes


@dataclass(frozen=True)
class Advice:
    """A recommendation. `gain` is the possible speedup of a step minus 1, or 0 if it only protects the run."""

    gain: float
    text: str


@dataclass(frozen=True)
class MachineReport:
    """A machine's description and measurements. Sizes are in bytes."""

    processor: str
    cores: int
    cpus: int  # logical processors that this process may use
    cpu_quota: float | None
    numa_nodes: int
    isa: list[str]
    memory_bytes: int
    memory_limit_bytes: int | None
    swap_bytes: int
    compiler: str | None
    allocator: str
    openmp: list[str]
    torch: str
    torch_blas: str
    transparent_huge_pages: str | None
    governor: str | None
    omp_num_threads: str | None
    isa_limits: dict[str, str]
    cores_usable: int
    bf16_native: bool
    available_bytes: int
    cache: str
    cache_free_bytes: int
    gpu: str | None
    kernels: str
    kernels_problem: str | None
    caching_allocator: bool
    caching_allocator_problem: str | None
    cache_problem: str | None
    gemm_flops_per_second: dict[str, float | None]  # by precision; None: no instructions or no kernels
    memory_bandwidth_bytes_per_second: float
    busy_cores: float  # used by other programs
    advice: tuple[Advice, ...] = ()


def doctor(progress: ReportProgress) -> MachineReport:
    cache = cache_dir(None)
    torch.set_num_threads(resolve_threads(TrainingConfig()))
    progress("measuring this machine", 0, 0)
    strain = LoadMeter()
    time.sleep(USAGE_SECONDS)
    others = strain.sample()
    unsafe: list[str] = []
    private_cache(unsafe.append)
    kernels = library.load()
    no_caching = "the C++ kernels are not loaded" if kernels else library.why_no_caching_allocator()
    bf16, threads = has_native_bf16(), torch.get_num_threads()
    facts = MachineReport(
        **hardware(),
        **software(),
        cores_usable=available_cores(),
        bf16_native=bf16,
        available_bytes=available_memory(torch.device("cpu")),
        cache=str(cache),
        cache_free_bytes=free_disk_bytes(cache.absolute()),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        kernels=library.name(),
        kernels_problem=kernels,
        caching_allocator=no_caching is None,
        caching_allocator_problem=no_caching,
        cache_problem=unsafe[0] if unsafe else None,
        gemm_flops_per_second={
            "fp32": peak_gemm_rate(cache, "fp32", "cpu", threads),
            "bf16": peak_gemm_rate(cache, "bf16", "cpu", threads) if bf16 else None,
            **{
                integer: peak_gemm_rate(cache, integer, "cpu", threads) if library.available() else None
                for integer in INTEGERS
            },
        },
        memory_bandwidth_bytes_per_second=bandwidth(),
        busy_cores=others["other_cores"] + others["stolen_cores"],
    )
    return replace(facts, advice=tuple(sorted(_advice(facts), key=lambda a: -a.gain)))


def _advice(facts: MachineReport) -> list[Advice]:
    """Returns advice with gains measured on two cores with AMX (docs/lab-notes.md) or computed from `facts`."""
    return [*_build_advice(facts), *_cores_advice(facts), *_memory_advice(facts)]


def _build_advice(facts: MachineReport) -> Iterator[Advice]:
    fp32, bf16 = (facts.gemm_flops_per_second[precision] for precision in ("fp32", "bf16"))
    if facts.kernels == "torch":
        yield Advice(
            1.0,
            f"sansgpu's C++ kernels cannot be loaded ({facts.kernels_problem}); install a wheel of sansgpu for this "
            "platform, or install a C++ compiler and then sansgpu from source.",
        )
    if facts.cache_problem:
        yield Advice(0.0, facts.cache_problem)
    if facts.isa_limits:
        names = ", ".join(f"{name}={value}" for name, value in facts.isa_limits.items())
        yield Advice(1.0, f"unset {names}; it prevents libraries from using the CPU's fastest instructions.")
    if "oneDNN" not in facts.torch_blas:
        yield Advice(
            0.5, "this build of torch has no oneDNN, which speeds up matrix products; install torch from PyPI."
        )
    if bf16 and fp32 and bf16 < MIN_BF16_SPEEDUP * fp32:
        yield Advice(
            0.0,
            "matrix products in bf16 are hardly faster than in fp32 on this machine; precision auto chooses the "
            "faster one.",
        )


def _cores_advice(facts: MachineReport) -> Iterator[Advice]:
    usable, busy, quota = facts.cores_usable, facts.busy_cores, facts.cpu_quota
    cores = min(facts.cpus, facts.cores)
    if busy > MIN_BUSY_CORES:
        gain = busy / max(usable - busy, usable / 2)
        yield Advice(gain, f"other programs use {busy:.1f} cores; stop them, or reserve cores for the run.")
    if quota and quota < cores:
        yield Advice(
            cores / quota - 1, f"the container is limited to {quota:.1f} of {cores} cores; raise its CPU limit."
        )
    if facts.numa_nodes > 1:
        nodes = facts.numa_nodes
        yield Advice(0.3, f"start one process per NUMA node ({nodes}): sansgpu train CONFIG --processes auto.")
    if facts.governor not in (None, "performance", "schedutil"):
        command = "cpupower frequency-set -g performance"
        yield Advice(0.2, f"the CPU frequency governor is {facts.governor}; set it to performance ({command}).")
    if len(facts.openmp) > 1:
        yield Advice(
            0.1,
            f"several OpenMP runtimes compete for the cores ({', '.join(facts.openmp)}); install packages that share "
            "one.",
        )


def _memory_advice(facts: MachineReport) -> Iterator[Advice]:
    if facts.transparent_huge_pages == "never":
        command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Advice(0.03, f"transparent huge pages are off; enable them for programs that request them ({command}).")
    if facts.available_bytes < MIN_FREE_MEMORY:
        yield Advice(0.0, f"only {facts.available_bytes / 1e9:.1f} GB of memory are available; stop other programs.")
    if facts.cache_free_bytes < MIN_FREE_DISK:
        free = facts.cache_free_bytes / 1e9
        yield Advice(
            0.0,
            f"the disk of {facts.cache} has only {free:.1f} GB free; set SANSGPU_CACHE to a folder on a larger disk.",
        )

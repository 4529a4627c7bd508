"""`sansgpu doctor`: what this machine is and can do, and what to change to make it faster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sansgpu.config import TrainingConfig
from sansgpu.kernels import native
from sansgpu.machine.compilation import missing_for_compile
from sansgpu.machine.compiled import compiled_cache
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.inspect import hardware, software
from sansgpu.machine.probe import (
    available_cores,
    available_memory,
    cache_dir,
    gemm_flops_per_second,
    has_native_bf16,
    resolve_threads,
)
from sansgpu.machine.roofline import bandwidth
from sansgpu.machine.usage import Strain

Result = dict[str, Any]

STRAIN_SECONDS = 0.5  # others are watched
BUSY = 0.25  # cores' worth of other programs that is worth a word
HARDLY = 1.2  # times as fast
LITTLE_DISK, LITTLE_MEMORY = 5e9, 2e9


@dataclass(frozen=True)
class Advice:
    """`gain` is by how much a step may become faster; 0 for what only protects it."""

    gain: float
    text: str


def doctor() -> Result:
    """Describe this machine, after measuring it for a few seconds."""
    cache = cache_dir(None)
    torch.set_num_threads(resolve_threads(TrainingConfig()))
    strain = Strain()
    time.sleep(STRAIN_SECONDS)
    others = strain.seen()
    device = torch.device("cpu")
    unsafe: list[str] = []
    kernels = native.load(compiled_cache(unsafe.append))
    bf16 = has_native_bf16()
    threads = torch.get_num_threads()
    rates = {
        "fp32": gemm_flops_per_second("fp32", threads=threads),
        "bf16": gemm_flops_per_second("bf16", threads=threads) if bf16 else None,  # emulated it takes long
    }
    facts: Result = {
        **hardware(),
        **software(),
        "cores_usable": available_cores(),
        "bf16_native": bf16,
        "available_bytes": available_memory(device),
        "cache": str(cache),
        "cache_free_bytes": free_disk_bytes(cache.absolute()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": "native" if kernels is None else "torch",
        "kernels_problem": kernels,
        "cache_problem": unsafe[0] if unsafe else None,
        "gemm_flops_per_second": rates,
        "memory_bandwidth_bytes_per_second": bandwidth(),
        "busy_cores": others["other_cores"] + others["stolen_cores"],
    }
    advice = sorted(_advice(facts), key=lambda a: -a.gain)
    return {**facts, "advice": [{"gain": a.gain, "text": a.text} for a in advice]}


def _advice(facts: Result) -> list[Advice]:
    """Gains as measured on two cores with AMX (docs/lab-notes.md), or by the machine's own figures."""
    return [*_build_advice(facts), *_cores_advice(facts), *_memory_advice(facts)]


def _build_advice(facts: Result) -> Iterator[Advice]:
    rates, missing = facts["gemm_flops_per_second"], missing_for_compile()
    if missing:
        yield Advice(
            1.0, f"install {missing} (Debian: apt install g++ python3-dev): our kernels and compiling need it."
        )
    elif facts["kernels"] != "native":
        problem = facts["kernels_problem"]
        yield Advice(1.0, f"our kernels do not compile ({problem}), and plain torch does their work.")
    if facts["cache_problem"]:
        yield Advice(0.0, facts["cache_problem"])
    if facts["isa_limits"]:
        names = ", ".join(f"{name}={value}" for name, value in facts["isa_limits"].items())
        yield Advice(1.0, f"unset {names}: it keeps torch from instructions that this processor may have.")
    if "oneDNN" not in facts["torch_blas"]:
        yield Advice(0.5, "this torch was built without oneDNN, which has the fast products; install one from PyPI.")
    if facts["bf16_native"] and rates["bf16"] < HARDLY * rates["fp32"]:
        yield Advice(0.0, "bf16 products are hardly faster than fp32 here; precision auto measures and decides.")


def _cores_advice(facts: Result) -> Iterator[Advice]:
    usable, busy, quota = (facts[key] for key in ("cores_usable", "busy_cores", "cpu_quota"))
    cores = min(facts["cpus"], facts["cores"])
    if busy > BUSY:
        gain = busy / max(usable - busy, usable / 2)
        yield Advice(gain, f"others keep {busy:.1f} cores busy; stop them, or give the run cores of its own.")
    if quota and quota < cores:
        yield Advice(cores / quota - 1, f"the container may use {quota:.1f} of {cores} cores; raise its CPU limit.")
    if facts["numa_nodes"] > 1:
        nodes = facts["numa_nodes"]
        yield Advice(0.3, f"{nodes} NUMA nodes: one process for each of them (sansgpu train CONFIG --processes auto).")
    if facts["governor"] not in (None, "performance", "schedutil"):
        command = "cpupower frequency-set -g performance"
        yield Advice(0.2, f"the clock's governor is {facts['governor']}; set it to performance ({command}).")
    if len(facts["openmp"]) > 1:
        yield Advice(0.1, f"several OpenMP runtimes compete for the cores: {', '.join(facts['openmp'])}.")


def _memory_advice(facts: Result) -> Iterator[Advice]:
    if facts["transparent_huge_pages"] == "never":
        command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Advice(0.03, f"transparent huge pages are off; {command} turns them on for those who ask.")
    if facts["available_bytes"] < LITTLE_MEMORY:
        yield Advice(0.0, f"only {facts['available_bytes'] / 1e9:.1f} GB of memory are available.")
    if facts["cache_free_bytes"] < LITTLE_DISK:
        free = facts["cache_free_bytes"] / 1e9
        yield Advice(0.0, f"{free:.1f} GB are free for {facts['cache']}; set SANSGPU_CACHE to a larger disk.")

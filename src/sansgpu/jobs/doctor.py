"""`sansgpu doctor`: what this machine is and can do, and what to change to make it faster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import TrainingConfig
from sansgpu.kernels import native
from sansgpu.machine.compilation import missing_for_compile
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.inspect import hardware, software
from sansgpu.machine.probe import (
    available_cores,
    available_memory,
    cache_dir,
    has_native_bf16,
    machine_busy_cores,
    resolve_threads,
)
from sansgpu.machine.roofline import bandwidth, gemm_rate

Result = dict[str, Any]

GEMM_SIZE = 2048
BUSY = 0.25  # cores' worth of other programs that is worth a word
LITTLE_DISK, LITTLE_MEMORY = 5e9, 2e9


@dataclass(frozen=True)
class Advice:
    """`gain` is by how much a step may become faster; 0 for what only protects it."""

    gain: float
    text: str


def doctor(cache: Path | None = None) -> Result:
    """Look, and measure for a few seconds."""
    cache = cache or cache_dir(None)
    torch.set_num_threads(resolve_threads(TrainingConfig()))
    busy = machine_busy_cores()
    device = torch.device("cpu")
    kernels = native.load(cache)
    bf16 = has_native_bf16()
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
        "gemm_flops_per_second": {p: gemm_rate(GEMM_SIZE, p) for p in (("fp32", "bf16") if bf16 else ("fp32",))},
        "memory_bandwidth_bytes_per_second": bandwidth(),
        "busy_cores": busy,
    }
    if not bf16:
        facts["gemm_flops_per_second"]["bf16"] = None  # emulated: so slow that measuring it would take long
    advice = sorted(_advice(facts), key=lambda a: -a.gain)
    return {**facts, "advice": [{"gain": a.gain, "text": a.text} for a in advice]}


def _advice(facts: Result) -> list[Advice]:
    """Gains as measured on two cores with AMX (docs/lab-notes.md), or by the machine's own figures."""
    found = []
    rates, usable, cpus = facts["gemm_flops_per_second"], facts["cores_usable"], facts["cpus"]
    missing = missing_for_compile()
    if missing:
        found.append(
            Advice(1.0, f"install {missing} (Debian: apt install g++ python3-dev): our kernels and compiling need it.")
        )
    elif facts["kernels"] != "native":
        found.append(
            Advice(1.0, f"our kernels do not compile ({facts['kernels_problem']}); plain torch does their work.")
        )
    if facts["isa_limits"]:
        names = ", ".join(f"{name}={value}" for name, value in facts["isa_limits"].items())
        found.append(Advice(1.0, f"unset {names}: it keeps torch from instructions that this processor may have."))
    if facts["busy_cores"] > BUSY:
        gain = facts["busy_cores"] / max(usable - facts["busy_cores"], 0.5)
        found.append(
            Advice(
                gain,
                f"other programs keep {facts['busy_cores']:.1f} cores busy; stop them, or give the run cores of its own.",
            )
        )
    threads = facts["omp_num_threads"]
    if threads and threads.isdigit() and int(threads) < usable:
        found.append(
            Advice(
                usable / int(threads) - 1, f"OMP_NUM_THREADS is {threads}, and {usable} cores may be used; unset it."
            )
        )
    quota = facts["cpu_quota"]
    if quota and quota < min(cpus, facts["cores"]):
        found.append(
            Advice(
                min(cpus, facts["cores"]) / quota - 1,
                f"the container may use {quota:.1f} of {cpus} cores; raise its CPU limit, to a whole number of cores.",
            )
        )
    if facts["governor"] not in (None, "performance", "schedutil"):
        found.append(
            Advice(
                0.2,
                f"the clock's governor is {facts['governor']}; set it to performance (cpupower frequency-set -g performance).",
            )
        )
    if len(facts["openmp"]) > 1:
        found.append(
            Advice(0.1, f"several OpenMP runtimes are loaded ({', '.join(facts['openmp'])}); their threads compete.")
        )
    if facts["bf16_native"] and rates["bf16"] and rates["bf16"] < 1.2 * rates["fp32"]:
        found.append(
            Advice(
                0.0,
                "bf16 products are hardly faster than fp32 here, whatever the flags say; precision auto measures and decides.",
            )
        )
    if facts["numa_nodes"] > 1:
        found.append(
            Advice(
                0.3,
                f"{facts['numa_nodes']} NUMA nodes: bind the run to one (numactl --cpunodebind=0 --membind=0) unless it needs them all.",
            )
        )
    if facts["transparent_huge_pages"] == "never":
        found.append(
            Advice(0.03, "transparent huge pages are off; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled.")
        )
    if "oneDNN" not in facts["torch_blas"]:
        found.append(
            Advice(0.5, "this torch was built without oneDNN, which has the fast products; install one from PyPI.")
        )
    if facts["available_bytes"] < LITTLE_MEMORY:
        found.append(
            Advice(
                0.0, f"{facts['available_bytes'] / 1e9:.1f} GB of memory are available; small models need about 1 GB."
            )
        )
    if facts["cache_free_bytes"] < LITTLE_DISK:
        found.append(
            Advice(
                0.0,
                f"{facts['cache_free_bytes'] / 1e9:.1f} GB are free for {facts['cache']}; set SANSGPU_CACHE to a larger disk.",
            )
        )
    return found

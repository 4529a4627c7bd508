"""What the machine has, and how fast it multiplies matrices in each precision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import psutil
import torch

from sansgpu.config import ConfigError, TrainingConfig
from sansgpu.machine import cgroup, cores
from sansgpu.machine.group import Group
from sansgpu.machine.roofline import best_seconds, gemm_rate
from sansgpu.machine.world import usual_threads

LAYER_TOKENS, LAYER_WIDTH = 1024, 768  # of a typical layer, timed to choose the precision
GEMM_SIZE = 2048  # large enough for the peak rate, small enough for tenths of a second on one slow core
MOST_THREADS, THREADS_PER_CPU = 512, 16  # more only wait for each other; a resumed run may ask for another machine's
# Flags that name hardware bf16 products; avx512 alone means emulation, several times slower than fp32.
NATIVE_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Environment:
    """What a result's bits depend on; recorded in every snapshot and compared on resume."""

    torch: str
    isa: str
    device: str
    threads: int
    world_size: int
    precision: str
    compile: str
    kernels: str
    micro_batch: int


def cache_dir(configured: str | None) -> Path:
    """The folder for tokens and measurements: as configured, else $SANSGPU_CACHE, else the user's cache folder.

    No compiled code is loaded from it: see `machine.compiled`.
    """
    if configured:
        return Path(configured).expanduser()
    if chosen := os.environ.get("SANSGPU_CACHE"):
        return Path(chosen)
    return user_cache_dir()


def user_cache_dir() -> Path:
    """The folder in the user's home for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sansgpu"


def resolve_device(training: TrainingConfig) -> torch.device:
    """The device to train on. Raises ConfigError where a GPU was asked for and there is none."""
    device = training.get_effective_device()
    if training.device == "cuda" and not training.force_cpu and device.type != "cuda":
        reason = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no GPU"
        raise ConfigError(f"device cuda was asked for, but {reason}; set device to cpu or auto.")
    return device


def allowed_cpus() -> int:
    """Logical processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores() -> int:
    """Physical cores this process may use, by affinity and container quota."""
    allowed = allowed_cpus()
    physical = min(len(cores.physical(cores.cpus())), psutil.cpu_count(logical=False) or allowed)
    quota = cgroup.cpu_quota()
    return max(1, min(physical, int(quota) if quota else physical))


def available_memory(device: torch.device) -> int:
    """Bytes that can still be had: of the GPU, or of the machine and within the container's limit."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free: int = psutil.virtual_memory().available
    left = cgroup.memory_left()
    return free if left is None else min(free, left)


def total_memory() -> int:
    """Bytes of the machine, or of the container's limit where that is less."""
    whole: int = psutil.virtual_memory().total
    limit = cgroup.memory_limit()
    return whole if limit is None else min(whole, limit)


def held_memory(device: torch.device) -> int:
    """Bytes this process has there."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    resident: int = psutil.Process().memory_info().rss
    return resident


def memory_for_run(device: torch.device, processes: int = 1) -> int:
    """Bytes this process may come to: its share of what can still be had, and what it has already."""
    return available_memory(device) // processes + held_memory(device)


def resolve_threads(training: TrainingConfig) -> int:
    """Compute threads for this process: as configured, else OMP_NUM_THREADS, else the cores it may use."""
    return (usual_threads() or available_cores()) if training.threads == "auto" else training.threads


def take_cores(group: Group, training: TrainingConfig, warn: Callable[[str], None]) -> int:
    """Compute threads for this process, which from now on runs on its own part of the machine's cores.

    Processes whose launcher gave each its own keep them. Raises ConfigError where all threads on this machine are more
    than its processors.
    """
    mine = group.peers[group.rank].cpus
    same = [rank for rank in group.local if group.peers[rank].cpus == mine]
    if len(same) > 1:
        cores.bind(cores.share(cores.cpus(), same.index(group.rank), len(same)))
    quota, here = cgroup.cpu_quota(), len(group.local)
    threads = resolve_threads(training)
    if training.threads == "auto" and quota and usual_threads() is None:
        threads = max(1, min(threads, int(quota / here)))
    cpus = len({cpu for rank in group.local for cpu in group.peers[rank].cpus})
    asked = "training.threads" if training.threads != "auto" else "OMP_NUM_THREADS"
    if threads > (most := max(MOST_THREADS, THREADS_PER_CPU * cpus)):  # OpenMP aborts where it cannot start them
        raise ConfigError(f"{asked} is {threads}, but at most {most:,} threads can run here; lower it.")
    if here > 1 and threads > 1 and threads * here > cpus:
        raise ConfigError(
            f"{here} processes of {threads} threads each are more than the {cpus} processors of "
            f"{group.peers[group.rank].host}; set {asked} to {max(1, cpus // here)}, or start fewer processes."
        )
    if here == 1 and threads > (usable := max(1, int(min(cpus, quota or cpus)))):
        warn(
            f"{threads} threads share {usable} processors and wait for each other; set training.threads to {usable}, "
            "or to auto."
        )
    if here > cpus and group.rank == group.local[0]:
        warn(f"{here} processes share {cpus} processors of {group.peers[group.rank].host}, and wait for each other.")
    return threads


def limit_tokenizer_threads(threads: int) -> None:
    """Bound the thread pool of `tokenizers`; it is read once, when the first batch is encoded."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


@cache
def isa() -> str:
    """The instruction set torch's kernels use here, e.g. `avx512+amx_bf16+avx512_bf16`."""
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512_vnni") if torch.cpu.get_capabilities().get(flag)]
    return "+".join([torch.backends.cpu.get_cpu_capability().lower(), *flags])


def has_native_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware, by its flags."""
    capabilities = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(capabilities.get(flag) for flag in NATIVE_BF16_FLAGS)


@cache
def gemm_flops_per_second(precision: str, device: str = "cpu", threads: int = 0) -> float:
    """The best rate of a square product here, in FLOP/s; `threads` only keys the cache."""
    return gemm_rate(GEMM_SIZE, precision, device)


def best_gemm_rate(known: float, reached: float, precision: str, device: str, processes: int = 1) -> float:
    """The GEMM rate in FLOP/s that a model's rate `reached` is compared with: `known`, or if the model beats it, a new
    measurement, since another program must have slowed the first one down. Never less than `reached`.

    A new measurement takes all `processes` to be as fast as this one.
    """
    return known if reached <= known else max(reached, processes * gemm_rate(GEMM_SIZE, precision, device))


def resolve_precision(training: TrainingConfig, device: torch.device) -> str:
    """`fp32` or `bf16`: bf16 where the flags promise it and timed products keep the promise."""
    wanted = training.wanted_precision
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    faster = has_native_bf16() and layer_seconds(torch.bfloat16) < layer_seconds(torch.float32)
    return "bf16" if faster else "fp32"


def layer_seconds(dtype: torch.dtype) -> float:
    """The three products of a linear layer's step: forward, and backward to its input and to its weight.

    Flags alone promise bf16 where it is emulated, and an emulation can be slow in one layout only.
    """
    x, weight = torch.ones(LAYER_TOKENS, LAYER_WIDTH, dtype=dtype), torch.ones(LAYER_WIDTH, LAYER_WIDTH, dtype=dtype)

    def products() -> None:
        torch.mm(x, weight.T)
        torch.mm(x, weight)
        torch.mm(x.T, x)

    return best_seconds(products, enough=0.0)


def describe_machine(environment: Environment) -> dict[str, object]:
    """The run's environment.json."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "numpy", "safetensors")
    return {
        **asdict(environment),
        "sansgpu": importlib.metadata.version("sansgpu"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "cores": available_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }

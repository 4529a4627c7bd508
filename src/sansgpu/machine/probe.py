"""The machine's devices, memory, threads and precision, and the run's use of them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import psutil
import torch

from sansgpu.config import ConfigError
from sansgpu.config.errors import is_installed
from sansgpu.config.training import TrainingConfig
from sansgpu.config.wording import counted
from sansgpu.events.progress import Warn
from sansgpu.machine import cgroup, cores, instruction_sets
from sansgpu.machine.address_space import address_space_left, address_space_limit
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.distributed.world import allowed_cpus, threads_from_environment
from sansgpu.version import __version__

# Address space that a run reserves and does not use: stacks and heaps of threads, libraries. Measured: 460 to 750 MB.
RESERVED_BYTES = 640 << 20
MAX_THREADS, MAX_THREADS_PER_CPU = 512, 16  # a thread count is valid up to the larger limit; OpenMP may abort beyond


def available_cores() -> int:
    """Returns the number of physical cores this process may use, by affinity and container quota."""
    allowed = len(allowed_cpus())
    physical = min(len(cores.physical_cores(cores.cpus())), psutil.cpu_count(logical=False) or allowed)
    quota = cgroup.cpu_quota()
    return max(1, min(physical, int(quota) if quota else physical))


def available_memory(device: torch.device) -> int:
    """Returns the available memory in bytes, of the GPU, or of the machine within the limits of this process."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    left = address_space_left()
    return _shared_memory() if left is None else min(_shared_memory(), left)


def _shared_memory() -> int:
    """Returns the bytes available to all processes of this container, or of the machine."""
    free: int = psutil.virtual_memory().available
    left = cgroup.available_memory()
    return free if left is None else min(free, left)


def memory_limit() -> int | None:
    """Returns the tightest limit of the container's memory and of this process's address space, or None."""
    limits = (cgroup.memory_limit(), address_space_limit())
    return min((limit for limit in limits if limit is not None), default=None)


def total_memory() -> int:
    """Returns the machine's memory in bytes, or `memory_limit` if that is less."""
    total: int = psutil.virtual_memory().total
    limit = memory_limit()
    return total if limit is None else min(total, limit)


def held_memory(device: torch.device) -> int:
    """Returns the bytes this process uses on `device`."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    resident: int = psutil.Process().memory_info().rss
    return resident


def memory_for_run(device: torch.device, processes: int = 1) -> int:
    """Returns the bytes this process may use: its share of the available memory plus what it already uses."""
    if device.type == "cuda":
        return available_memory(device) // processes + held_memory(device)
    share, left = _shared_memory() // processes, address_space_left()
    return (share if left is None else min(share, max(0, left - RESERVED_BYTES))) + held_memory(device)


def resolve_threads(training: TrainingConfig) -> int:
    """Returns the number of compute threads: as configured, else OMP_NUM_THREADS, else the usable cores."""
    return (threads_from_environment() or available_cores()) if training.threads == "auto" else training.threads


def threads_of_share(cpus: float, processes: int) -> int:
    """Returns the number of compute threads per process if `processes` processes share a container's CPUs."""
    return max(1, int(cpus / processes))


def pin_cores(group: Group, training: TrainingConfig, warn: Warn) -> int:
    """Pins this process to its share of the machine's cores and returns its number of compute threads.

    Keeps an affinity that the launcher set per process. Raises ConfigError if the run's processes on this machine would
    have more threads than there are processors.
    """
    own_cpus = group.peers[group.rank].cpus
    same = [rank for rank in group.local_ranks if group.peers[rank].cpus == own_cpus]
    if len(same) > 1:
        cores.bind(cores.partition(cores.cpus(), same.index(group.rank), len(same)))
    quota, local_size = cgroup.cpu_quota(), len(group.local_ranks)
    threads = resolve_threads(training)
    if training.threads == "auto" and quota and threads_from_environment() is None:
        threads = min(threads, threads_of_share(quota, local_size))
    cpus = len({cpu for rank in group.local_ranks for cpu in group.peers[rank].cpus})
    setting = "training.threads" if training.threads != "auto" else "OMP_NUM_THREADS"
    if threads > (limit := max(MAX_THREADS, MAX_THREADS_PER_CPU * cpus)):  # OpenMP aborts if it cannot start them
        raise ConfigError(f"{setting} is {threads}, but this machine supports at most {limit:,} threads; lower it.")
    if local_size > 1 and threads > 1 and threads * local_size > cpus:
        raise ConfigError(
            f"{local_size} processes with {threads} threads each exceed the {counted(cpus, 'processor')} of "
            f"{group.peers[group.rank].host}; set {setting} to {max(1, cpus // local_size)}, or start fewer processes."
        )
    if local_size == 1 and threads > (usable := max(1, int(min(cpus, quota or cpus)))):
        warn(
            f"{threads} threads share {counted(usable, 'processor')}, which slows training down; set training.threads "
            f"to {usable} or auto."
        )
    if local_size > cpus and group.rank == group.local_ranks[0]:
        host = group.peers[group.rank].host
        warn(
            f"{local_size} processes share {counted(cpus, 'processor')} of {host}, which slows training down; start "
            "fewer processes."
        )
    return threads


def limit_tokenizer_threads(threads: int) -> None:
    """Limits the thread pool of `tokenizers`, which reads the setting when it encodes the first batch."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


@cache
def isa() -> str:
    """Returns the instruction set that torch's kernels use on this machine, e.g. `avx512+amx_bf16+avx512_bf16`."""
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512_vnni") if torch.cpu.get_capabilities().get(flag)]
    return "+".join([torch.backends.cpu.get_cpu_capability().lower(), *flags])


def has_native_bf16() -> bool:
    """Returns whether the instruction set, which SANSGPU_ISA can force, includes bf16 products.

    Without them bf16 is emulated, slower than fp32.
    """
    return torch.backends.mkldnn.is_available() and instruction_sets.allowed()[-1].bf16


def has_bf16_tensors(precision: str) -> bool:
    """Returns whether tensors are bf16 in a precision of matmuls; otherwise they are fp32.

    They are bf16 in bf16, and in int8 on processors that multiply bf16.
    """
    return precision == "bf16" or (precision == "int8" and has_native_bf16())


@contextmanager
def one_thread() -> Iterator[None]:
    """Context that limits torch to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tensor_dtype(precision: str) -> torch.dtype:
    """Returns the dtype of tensors in a precision of matmuls."""
    return torch.bfloat16 if has_bf16_tensors(precision) else torch.float32


def mixed_precision(device: torch.device, precision: str) -> torch.autocast:
    """Returns a context in which matmuls of fp32 weights take bf16 operands, if `precision` has bf16 tensors."""
    return torch.autocast(device.type, torch.bfloat16, enabled=has_bf16_tensors(precision))


def is_emulated(precision: str, device: str) -> bool:
    """Returns whether `device` has no instructions for products in this precision."""
    return precision == "bf16" and device == "cpu" and not has_native_bf16()


def describe_machine(environment: Mapping[str, object]) -> dict[str, object]:
    """Returns the content of the run's environment.json."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "numpy", "safetensors")
    return {
        **environment,
        "sansgpu": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "cores": available_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: importlib.metadata.version(name) for name in packages if is_installed(name)},
    }

"""Configures a process for training: device, threads, memory allocation and kernels."""

from __future__ import annotations

import torch

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.config.training import TrainingConfig
from sansgpu.config.wording import counted
from sansgpu.events.progress import Warn
from sansgpu.kernels.library import load_kernels_and_allocators
from sansgpu.kernels.matmul import INTEGERS
from sansgpu.kernels.roofline import resolve_precision
from sansgpu.machine.distributed.group import SINGLE_PROCESS, Group
from sansgpu.machine.execution import Environment, Execution
from sansgpu.machine.instruction_sets import allowed
from sansgpu.machine.probe import has_native_bf16, is_emulated, limit_tokenizer_threads, memory_for_run, pin_cores

# Duration of a step in emulated bf16 relative to fp32, by kernels. Measured on processors with AVX2 only.
EMULATION_COST = {"native": "up to twice", "torch": "5 to 35 times"}


def configure_process(
    config: Config, before: Environment | None, warn: Warn, group: Group = SINGLE_PROCESS
) -> tuple[Execution, int]:
    """Configures threads and memory allocation of this process and loads the kernels.

    Returns the execution, with provisional micro-batches of one example, and the available memory in bytes. On resume,
    `before` is the recorded environment, and automatic choices repeat it.
    """
    training = config.training
    device: torch.device = training.get_effective_device()
    if device.type == "cuda" and group.size > 1:
        device = _gpu_of_rank(training, group)
    threads = pin_cores(group, training, warn)
    recorded = before["threads"] if before and before["world_size"] == group.size else None
    torch.set_num_threads(_recorded_or(recorded, threads, training.threads))
    torch.set_flush_denormal(True)
    deterministic = device.type == "cuda"
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler: 1 s
        # With warn_only, the backward passes of attention would only warn and stay nondeterministic.
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _choose_vector_math()
    limit_tokenizer_threads(config.data.preprocessing_num_workers)
    plain = before is not None and before["kernels"] == "torch" and training.kernels == "auto"
    requested = "torch" if plain else training.kernels
    kernels = load_kernels_and_allocators(requested, device, config.settings.varying_length, warn)
    precision = group.broadcast_object(lambda: _precision(config, before, device, kernels))
    if group.is_main:
        _warn_of_precision(training, before, precision, device, kernels, warn)
    available = min(group.all_gather_object(memory_for_run(device, len(group.local_ranks))))
    return Execution(
        precision=precision,
        kernels=kernels,
        optimizer=training.optimizer,
        world_size=group.size,
        threads=torch.get_num_threads(),
        device=device,
        group=group,
    ), available


def _precision(config: Config, before: Environment | None, device: torch.device, kernels: str) -> str:
    """Returns the precision of matmuls. Raises ConfigError if it is int16 or int8 without our kernels."""
    training = config.training
    begun_in = before["precision"] if before and training.precision == "auto" else None
    if begun_in is not None and not (begun_in in INTEGERS and kernels == "torch"):
        return begun_in
    # Some pretrained models have such outliers that int8 costs more than 0.1%: the loss of Gemma 3 rises by 0.4%.
    from_scratch = config.model.name_or_path is None
    precision = resolve_precision(training, device, kernels != "torch", takes_int8=from_scratch)
    if precision in INTEGERS and kernels == "torch":
        where = "a GPU" if device.type == "cuda" else "PyTorch's operators (training.kernels torch)"
        raise ConfigError(
            f"training.precision is {precision}, which {where} cannot compute; set it to auto, or use the CPU with "
            "sansgpu's C++ kernels."
        )
    return precision


def _warn_of_precision(
    training: TrainingConfig, before: Environment | None, precision: str, device: torch.device, kernels: str, warn: Warn
) -> None:
    """Warns of fp32 in spite of `use_amp`, of emulated bf16, and of int8 that is no faster on this processor."""
    if training.use_amp and precision == "fp32":
        slower = "bf16 is slower than fp32 on this processor"
        unsupported = slower if has_native_bf16() else "this processor does not support bf16"
        reason = "it started in fp32" if before and before["precision"] == "fp32" else unsupported
        warn(f"training.use_amp is true, but this run computes in fp32, because {reason}.")
    if training.precision == precision and is_emulated(precision, device.type):
        warn(
            f"training.precision is {precision}, which this processor only emulates: a step takes "
            f"{EMULATION_COST['torch' if kernels == 'torch' else 'native']} as long as in fp32; set it to auto or fp32."
        )
    if precision == "int8" and not allowed()[-1].int8:
        warn(
            "training.precision is int8, but this processor multiplies 8-bit integers no faster than other numbers; "
            "auto is as fast and more exact."
        )


def _gpu_of_rank(training: TrainingConfig, group: Group) -> torch.device:
    """Returns this local rank's GPU. Raises ConfigError if there are fewer GPUs than processes, or with sharding."""
    local_rank, count = group.local_ranks.index(group.rank), torch.cuda.device_count()
    if len(group.local_ranks) > count:
        raise ConfigError(
            f"{len(group.local_ranks)} processes were started for {counted(count, 'GPU')}; start one process per GPU."
        )
    if training.sharding != "none":
        raise ConfigError(
            f"training.sharding {training.sharding} works only on CPUs; set it to none, or set device to cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _recorded_or(recorded: int | None, resolved: int, requested: int | str) -> int:
    """Returns the recorded thread count if it was automatic and is available, because exact results depend on it."""
    return recorded if recorded is not None and requested == "auto" and recorded <= resolved else resolved


def _choose_vector_math() -> None:
    """Makes MKL's vector math functions, which torch uses for sine, exp and others, deterministic.

    At its first call, an MKL function selects its code path for this processor. If two threads make the first call
    together, one may get another code path whose last bits differ; this made every second pair of runs differ.
    """
    x = torch.full((8,), 0.5)
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh, torch.erf, torch.sqrt):
        for dtype in (torch.float32, torch.float64):
            function(x.to(dtype))

"""Compares the presets: their estimated memory, and their training time on kinds of processors.

A step takes the time of its FLOPs at the rate of matrix products, plus that of the other work on the same cores. With
the constants below, this gives the measured speeds in docs/benchmarks.md within a third.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sansgpu.config import PRESETS, change_config
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.kernels import library
from sansgpu.kernels.roofline import peak_gemm_rate, resolve_precision
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import MARGIN, Memory, effective_batch, micro_batch_choices, usual_micro_batch
from sansgpu.machine.probe import memory_for_run, resolve_threads
from sansgpu.planning.results import FittingPreset, FittingPresets, PresetRow, ProcessorSpeed
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from sansgpu.train.optim import choose_optimizer

OPTIMAL_TOKENS = 20  # compute-optimal training tokens per parameter (Hoffmann et al., arXiv 2203.15556)
# Measured rate of matrix products / published peak rate at the base clock: of vector units in floating point and for
# 16-bit integers (with AVX2), and of AMX.
VECTOR_SHARE, INT16_SHARE, AMX_SHARE = 0.8, 0.65, 0.45
# Measured speed of 16 cores with AMX / the estimate if each were as fast as one of two: 0.38 (m80), 0.31 (cpu_small).
AMX_SHARE_OF_16_CORES = 0.35
# FLOPs of the model for which one core spends a second outside matrix products; measured for 11M to 92M parameters.
FLOPS_PER_OTHER_SECOND = 0.8e12


@dataclass(frozen=True)
class Processor:
    """A kind of processor with its rate of matrix products."""

    name: str
    cores: int
    precision: str
    gemm_flops_per_second: float
    share_of_cores: float = 1.0  # speed of all cores / (speed of one core x their number)

    def tokens_per_second(self, flops_per_token: float) -> float:
        other = flops_per_token / (self.cores * FLOPS_PER_OTHER_SECOND)
        return self.share_of_cores / (flops_per_token / self.gemm_flops_per_second + other)


def _processor(
    name: str, cores: int, precision: str, flops_per_cycle: int, hertz: float, share: float, share_of_cores: float = 1.0
) -> Processor:
    """Describes a processor by the published peak of a core, in FLOPs per cycle, and its base clock."""
    rate = share * cores * flops_per_cycle * hertz
    return Processor(f"{name}, {counted(cores, 'core')}", cores, precision, rate, share_of_cores)


PROCESSORS = (
    # Two units of 16 multiplications of 16-bit integers; a desktop's Core i5 or Ryzen 5.
    _processor("AVX2", 4, "int16", 64, 3.5e9, INT16_SHARE),
    _processor("ARM", 8, "fp32", 32, 2.6e9, VECTOR_SHARE),  # Neoverse V1 (Graviton3)
    _processor("AVX-512", 8, "int16", 128, 2.3e9, INT16_SHARE),  # Ice Lake with VNNI (Xeon 8380)
    _processor("AVX512_BF16", 8, "bf16", 64, 3.25e9, VECTOR_SHARE),  # Zen 4 (EPYC 9354)
    _processor("AMX", 16, "bf16", 1024, 2.0e9, AMX_SHARE, AMX_SHARE_OF_16_CORES),  # Sapphire Rapids (Xeon 8480+)
)


def compare_presets(overrides: Sequence[str]) -> list[PresetRow]:
    """Returns the presets' memory, and their estimated speed on this machine and on other kinds of processors."""
    configs = [_preset(name, overrides) for name in PRESETS]
    processors = (*PROCESSORS, this_machine(configs[0]))
    available = memory_for_run(torch.device("cpu"))
    return [_row(name, config, processors, available) for name, config in zip(PRESETS, configs, strict=True)]


def presets_that_fit(memory: int | None, seconds: float | None, context: int | None) -> FittingPresets:
    """Returns which presets can be trained in `memory` bytes, and on how many tokens in `seconds`, on this machine.

    The default for `memory` is what this machine has available, and for `context` the presets' own.
    """
    lengths = [f"{key}={context}" for key in ("model.max_seq_len", "data.max_length") if context is not None]
    configs = [_preset(name, lengths) for name in PRESETS]
    here, available = this_machine(configs[0]), memory or memory_for_run(torch.device("cpu"))
    rows = [_fitting(name, config, here, available, seconds) for name, config in zip(PRESETS, configs, strict=True)]
    return {"memory_bytes": available, "seconds": seconds, "processor": "this machine", "presets": rows}


def _fitting(name: str, config: Config, here: Processor, available: int, seconds: float | None) -> FittingPreset:
    checkpointed = change_config(config, ["model.gradient_checkpointing=true"])
    choices = micro_batch_choices(config.training, config.window)
    usual = usual_micro_batch(config.window, choices)
    ways = [(config, size) for size in reversed(choices) if size <= usual] + [(checkpointed, 1)]
    needed = [(way, size, largest_memory(way, size)) for way, size in ways]
    chosen, size, memory = next((each for each in needed if each[2].fits(available)), needed[-1])
    costs = task_of(config).costs(config)
    parameters, speed = sum(costs.parameters().values()), here.tokens_per_second(costs.work(1).needed)
    return {
        "preset": name,
        "parameters": parameters,
        "context": config.window,
        "batch_size": size,
        "gradient_checkpointing": chosen.model.gradient_checkpointing,
        "needed_bytes": memory.least,
        "fits": memory.fits(available),
        "tokens_per_second": speed,
        "optimal_tokens": OPTIMAL_TOKENS * parameters,
        "optimal_seconds": OPTIMAL_TOKENS * parameters / speed,
        "tokens": None if seconds is None else int(speed * seconds),
    }


def _preset(name: str, overrides: Sequence[str]) -> Config:
    config, _ = load_config(Path(name), [*overrides, "training.max_steps=1000000"])
    return task_of(config).with_vocabulary(config)


def this_machine(config: Config) -> Processor:
    """Measures matrix products on this machine, which takes tenths of a second."""
    threads = resolve_threads(config.training)
    torch.set_num_threads(threads)
    precision = resolve_precision(config.training, torch.device("cpu"), library.load() is None, takes_int8=True)
    name = f"this one, {counted(threads, 'core')}"
    return Processor(name, threads, precision, peak_gemm_rate(cache_dir(None), precision, "cpu", threads))


def _row(name: str, config: Config, processors: Sequence[Processor], available: int) -> PresetRow:
    costs, batch = task_of(config).costs(config), effective_batch(config.training)
    size = usual_micro_batch(config.window, micro_batch_choices(config.training, config.window))
    memory = largest_memory(config, size)
    frugal = change_config(config, ["model.gradient_checkpointing=true"])
    parameters, flops = sum(costs.parameters().values()), costs.work(1).needed
    tokens = OPTIMAL_TOKENS * parameters
    return {
        "preset": name,
        "parameters": parameters,
        "batch_size": size,
        "gradient_accumulation_steps": batch // size,
        "window": config.window,
        "tokens_per_step": batch * config.window,
        "memory_bytes": memory.to_json(),
        "least_memory_bytes": max(memory.least for memory in _memories(frugal, 1)),
        "recommended_memory_bytes": int(MARGIN * memory.total),
        "available_bytes": available,
        "fits": memory.fits(available),
        "optimal_tokens": tokens,
        "speeds": [_speed(processor, flops, tokens) for processor in processors],
    }


def largest_memory(config: Config, size: int) -> Memory:
    """Returns the memory with micro-batches of `size` examples, in the precision that needs the most."""
    return max(_memories(config, size), key=lambda memory: memory.total)


def _memories(config: Config, size: int) -> Iterator[Memory]:
    """Yields the memory in each precision."""
    batch, costs = effective_batch(config.training), task_of(config).costs(config)
    work = costs.work(batch * config.window)
    optimizer = choose_optimizer(config.training.optimizer, work.needed, work.muon)
    for precision in ("fp32", "bf16"):
        yield costs.memory(Execution(size, batch // size, precision, kernels="native", optimizer=optimizer))


def _speed(processor: Processor, flops_per_token: float, tokens: int) -> ProcessorSpeed:
    speed = processor.tokens_per_second(flops_per_token)
    return {
        "processor": processor.name,
        "cores": processor.cores,
        "precision": processor.precision,
        "gemm_flops_per_second": processor.gemm_flops_per_second,
        "tokens_per_second": speed,
        "optimal_seconds": tokens / speed,
    }

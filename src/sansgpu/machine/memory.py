"""What a run needs in memory, and the micro-batch that fits."""

from __future__ import annotations

import bisect

from sansgpu.config import Config, ConfigError, TrainingConfig

MICRO_BATCH_TOKENS = 4096  # unmeasured: beyond this matmuls gain little, and activations leave the cache
MOST_TOKENS = 16384  # worth measuring
OVERHEAD_BYTES = 600 << 20  # the process itself: torch, its kernels and the libraries around it
STATE_BYTES = 16  # a parameter's weight, gradient and two moments, all fp32


def memory_needed(config: Config, parameters: int, micro_batch: int) -> int:
    """Bytes at the peak of a step: weights, gradients, optimizer state, activations, overhead; an estimate."""
    model, tokens = config.model, micro_batch * config.window
    layer = tokens * (16 * model.d_model + 4 * model.d_ff) * 4
    if model.attention_dropout or not model.modern:
        layer += 3 * micro_batch * model.n_heads * config.window**2 * 4
    kept = (1 if model.gradient_checkpointing else model.n_layers) * layer
    streams = model.n_layers * tokens * model.d_model * 4 if model.gradient_checkpointing else 0
    head = 3 * (model.vocab_size or 0) * model.d_model * 4
    return parameters * STATE_BYTES + kept + streams + head + OVERHEAD_BYTES


def effective_batch(training: TrainingConfig, world_size: int = 1) -> int:
    """Examples of a step over all ranks; `batch_size: auto` keeps it whatever the micro-batch."""
    accumulated = training.gradient_accumulation_steps
    return accumulated if training.batch_size == "auto" else training.batch_size * accumulated * world_size


def fitting_micro_batches(config: Config, parameters: int, available: int, world_size: int = 1) -> list[int]:
    """The micro-batches to choose from, in examples, smallest first: as configured, or all that divide the step.

    Raises ConfigError where nothing fits into memory.
    """
    if config.training.batch_size != "auto":
        _require_memory(config, parameters, config.training.batch_size, available)
        return [config.training.batch_size]
    share = -(-effective_batch(config.training) // world_size)
    largest = max(1, min(share, MOST_TOKENS // config.window))
    fitting = [
        size
        for size in range(1, largest + 1)
        if share % size == 0 and memory_needed(config, parameters, size) <= available
    ]
    if not fitting:
        _require_memory(config, parameters, 1, available)
    return fitting


def usual_micro_batch(config: Config, sizes: list[int]) -> int:
    """Of `sizes`, what serves most models, for runs too short to measure."""
    return max((size for size in sizes if size * config.window <= MICRO_BATCH_TOKENS), default=sizes[0])


def _require_memory(config: Config, parameters: int, micro_batch: int, available: int) -> None:
    needed = memory_needed(config, parameters, micro_batch)
    if needed > available:
        sizes = range(1, micro_batch)
        fits = bisect.bisect_right(sizes, available, key=lambda size: memory_needed(config, parameters, size))
        remedy = f"set training.batch_size to {fits}" if fits else "choose a smaller model or shorter windows"
        raise ConfigError(
            f"the run needs about {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available; {remedy}."
        )

"""Memory check of a run, and the configuration changes that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sansgpu.config import ConfigError, change_config
from sansgpu.config.schema import Config
from sansgpu.events.progress import Warn
from sansgpu.machine.address_space import address_space_limit
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import Memory, effective_batch, micro_batch_choices, micro_batches_per_rank
from sansgpu.machine.probe import has_bf16_tensors, has_native_bf16, memory_limit
from sansgpu.models.architectures import DecoderConfig
from sansgpu.models.costing import FULL
from sansgpu.tasks.registry import task_of

Shortage = Literal["refuse", "begin", "report"]

PARTS = (2, 4, 8)  # divisors to try
MIN_WINDOW = 32
OUTSIDE_BLOCKS = ("embedding", "positions", "head")
MAX_CHANGES = 3  # maximum number of suggestions
KEEP_BATCH = "training.gradient_accumulation_steps"
FEWER = "fewer parameters"  # replaced by the parameter counts
Option = tuple[tuple[str, ...], str]  # (settings, their cost)
Options = Iterator[Option]


@dataclass(frozen=True)
class ConfigChange:
    """A configuration change with its cost and the resulting memory."""

    settings: tuple[str, ...]
    cost: str
    memory: Memory

    def __str__(self) -> str:
        return f"{' '.join(self.settings)} ({self.memory.least / 1e9:.1f} GB; {self.cost})"


def estimate_memory(config: Config, execution: Execution, layers: int | None = None) -> Memory:
    """Estimates one process's memory. Sets `execution.accumulation` to match its micro-batch."""
    training = config.training
    accumulation = micro_batches_per_rank(training, execution.micro_batch, execution.world_size)
    is_local = execution.world_size > 1 and training.sync_every > 1
    if execution.world_size > 1 and not is_local and training.gradient_reduction == "fp32":
        accumulation = max(2, accumulation)  # gradients are reduced in fp32, as with accumulation
    costs = task_of(config).costs(config)
    shallow = costs if layers is None else costs.with_layers(layers)
    memory = shallow.memory(replace(execution, accumulation=accumulation))
    if execution.world_size == 1:
        return memory
    if is_local:  # the synchronized weights and the outer momentum
        outer = FULL * costs.trained()
        return replace(memory, optimizer=memory.optimizer + 2 * outer, snapshot=memory.snapshot + outer)
    memory = replace(memory, gradients=2 * memory.gradients)  # the buckets to reduce are copies; measured
    if training.sharding == "none":
        return memory
    return _sharded_memory(memory, costs.parameters(), training.sharding, execution)


def _sharded_memory(memory: Memory, parts: dict[str, int], sharding: str, execution: Execution) -> Memory:
    """Returns the memory if each rank holds its shard of fp32 weights and moments, and no copy of a snapshot."""
    ranks, weights, gradients = execution.world_size, memory.weights, memory.gradients
    if sharding == "full":
        blocks = sum(numbers for part, numbers in parts.items() if part not in OUTSIDE_BLOCKS)
        sharded_ratio = blocks / max(1, sum(parts.values()))
        gradients -= int(sharded_ratio * gradients / 2 * (1 - 1 / ranks))
        weights -= int(sharded_ratio * weights * (1 - 1 / ranks))
        weights += FULL * sum(parts.values())  # memory of the full model, built first, is not returned; measured
    elif has_bf16_tensors(execution.precision):
        masters = FULL * parts.get("adapter", sum(parts.values()))
        weights -= int(masters * (1 - 1 / ranks))
    return replace(memory, weights=weights, gradients=gradients, optimizer=memory.optimizer // ranks, snapshot=0)


def fitting_micro_batches(
    config: Config, execution: Execution, available: int, shortage: Shortage, warn: Warn
) -> list[int]:
    """Returns the micro-batch sizes that fit, in examples, smallest first.

    If none fits: `refuse` raises ConfigError with changes that would fit; `begin` returns the largest fraction of the
    smallest size that fits, or 1; `report` returns the smallest size.
    """
    choices = micro_batch_choices(config.training, config.window, execution.world_size)

    def fitting(sizes: list[int]) -> list[int]:
        return [s for s in sizes if estimate_memory(config, replace(execution, micro_batch=s)).fits(available)]

    if found := fitting(choices):
        return found
    if shortage == "report":
        return choices[:1]
    needed = estimate_memory(config, replace(execution, micro_batch=choices[0]))
    short = f"the run needs about {needed.least / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are available"
    if (limit := address_space_limit()) is not None and limit == memory_limit():
        short += f" within `ulimit -v` ({limit / 1e9:.1f} GB, including libraries and threads)"
    if shortage == "refuse":
        changes = "; or ".join(str(change) for change in changes_that_fit(config, execution, available))
        remedy = f"it fits with {changes}" if changes else "choose a much smaller model"
        raise ConfigError(f"{short}; {remedy}; --force starts it anyway.")
    parts = [size for size in _halves(choices[0]) if size < choices[0]]
    size = (fitting(parts) or [min(parts, default=choices[0])])[0]
    warn(f"{short}; starting anyway, with a micro-batch size of {size} and the same effective batch size.")
    return [size]


def changes_that_fit(config: Config, execution: Execution, available: int) -> list[ConfigChange]:
    """Returns up to three changes that each make the run fit, cheapest first, or else one combined change."""
    found: list[ConfigChange] = []
    for options in CHANGES:
        changes = (_change(config, execution, settings, cost) for settings, cost in options(config, execution))
        if change := next((c for c in changes if c is not None and c.memory.fits(available)), None):
            found.append(change)
    return found[:MAX_CHANGES] or _combine(config, execution, available)


def _combine(config: Config, execution: Execution, available: int) -> list[ConfigChange]:
    """Combines the strongest options of several changes until the run fits, then drops those that are not needed."""
    parts: list[Option] = []
    for options in CHANGES:
        furthest: Option | None = None
        for option in options(change_config(config, _merged(parts)), execution):
            change = _combined(config, execution, [*parts, option])
            if change is None:
                continue
            furthest = option
            if change.memory.fits(available):
                return [_without_needless(config, execution, available, [*parts, option])]
        if furthest:
            parts.append(furthest)
    return []


def _without_needless(config: Config, execution: Execution, available: int, parts: list[Option]) -> ConfigChange:
    for part in reversed(parts[:-1]):
        fewer = [other for other in parts if other is not part]
        change, changed = _combined(config, execution, fewer), change_config(config, _merged(fewer))
        same_step = _step_tokens(changed) == _step_tokens(config)
        if change and same_step and change.memory.fits(available):
            parts = fewer
    change = _combined(config, execution, parts)
    assert change is not None
    return change


def _combined(config: Config, execution: Execution, parts: list[Option]) -> ConfigChange | None:
    return _change(config, execution, _merged(parts), "; ".join(dict.fromkeys(cost for _, cost in parts)))


def _merged(parts: list[Option]) -> tuple[str, ...]:
    """Returns all settings; the last one of a key wins."""
    return tuple({setting.partition("=")[0]: setting for settings, _ in parts for setting in settings}.values())


def _step_tokens(config: Config) -> int:
    return effective_batch(config.training) * config.window


def _change(config: Config, execution: Execution, settings: tuple[str, ...], cost: str) -> ConfigChange | None:
    try:
        changed = change_config(config, settings)
    except ConfigError:  # the model's shape does not allow it
        return None
    training = changed.training
    size = micro_batch_choices(training, changed.window, execution.world_size)[0]
    precision = execution.precision if training.precision == "auto" else training.precision
    optimizer = execution.optimizer if training.optimizer == "auto" else training.optimizer
    execution = replace(execution, micro_batch=size, precision=precision, optimizer=optimizer)
    memory = estimate_memory(changed, execution)
    if FEWER in cost:
        now, then = (sum(task_of(c).costs(c).parameters().values()) / 1e6 for c in (config, changed))
        cost = cost.replace(FEWER, f"{then:.0f}M parameters instead of {now:.0f}M")
    return ConfigChange(settings, cost, memory)


def _smaller_micro_batch(config: Config, execution: Execution) -> Options:
    if config.training.batch_size == "auto":
        return
    batch = effective_batch(config.training)
    for size in _halves(config.training.batch_size)[1:]:
        if batch % size == 0:
            settings = (f"training.batch_size={size}", f"{KEEP_BATCH}={batch // size}")
            yield settings, "same effective batch size, a few percent slower"


def _bf16(config: Config, execution: Execution) -> Options:
    if execution.precision == "fp32" and has_native_bf16():
        yield ("training.precision=bf16",), "matrix products in bf16, which this CPU computes faster"


def _sharded(config: Config, execution: Execution) -> Options:
    training = config.training
    if execution.world_size > 1 and training.sharding == "none":
        yield ("training.sharding=optimizer",), "training pauses while snapshots are written"
    plain = training.master_weights == training.optimizer_state == "fp32"
    refused = training.compile == execution.compile == "on"  # fully sharded blocks cannot be compiled
    if execution.world_size > 1 and training.sharding != "full" and plain and not refused:
        yield ("training.sharding=full",), "the weights of every block are gathered for every micro-batch"


def _checkpointing(config: Config, execution: Execution) -> Options:
    if not config.model.gradient_checkpointing:
        yield ("model.gradient_checkpointing=true",), "activations are recomputed, about a third slower"


def _muon(config: Config, execution: Execution) -> Options:
    if execution.optimizer == "adamw":
        yield ("training.optimizer=muon",), "a different optimizer, which needs a different learning rate"


def _shorter_context(config: Config, execution: Execution) -> Options:
    for part in PARTS:
        if (window := config.window // part) >= MIN_WINDOW:
            accumulation = config.training.gradient_accumulation_steps * part
            yield (f"data.max_length={window}", f"{KEEP_BATCH}={accumulation}"), f"a context of {window} tokens"


def _fewer_layers(config: Config, execution: Execution) -> Options:
    for part in PARTS:
        if config.model.n_layers >= part:
            yield (f"model.n_layers={config.model.n_layers // part}",), FEWER


def _smaller_width(config: Config, execution: Execution) -> Options:
    model = DecoderConfig.of(config)
    for part in PARTS:
        if not (model.d_model % part or model.n_heads % part or model.kv_heads % part):
            settings = [f"model.{key}={max(1, getattr(model, key) // part)}" for key in ("d_model", "d_ff", "n_heads")]
            settings += [f"model.n_kv_heads={model.kv_heads // part}"] if model.n_kv_heads else []
            yield tuple(settings), FEWER


# Kinds of changes: first those that only cost time, then those that cost quality. Each yields its mildest option first.
CHANGES = (
    _smaller_micro_batch,
    _bf16,
    _sharded,
    _checkpointing,
    _muon,
    _shorter_context,
    _fewer_layers,
    _smaller_width,
)


def _halves(size: int) -> list[int]:
    """Returns [size, size // 2, size // 4, ..., 1]."""
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes

"""Whether a run fits into memory, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sansgpu.config import Config, ConfigError, change_config
from sansgpu.machine.memory import Execution, Memory, effective_batch, micro_batch_choices, micro_batches_each
from sansgpu.machine.probe import has_native_bf16
from sansgpu.models.costing import FULL
from sansgpu.tasks import TaskKind

Shortage = Literal["refuse", "begin", "report"]

MARGIN = 1.05  # the estimate is within a few per cent of what is measured; the rest of the machine moves too
PARTS = (2, 4, 8)  # a half, a quarter, an eighth are tried
LEAST_WINDOW = 32
OUTSIDE_BLOCKS = ("embedding", "positions", "head")
MOST_CHANGES = 3  # are named where a run does not fit
ACCUMULATION = "training.gradient_accumulation_steps"
FEWER = "fewer parameters"  # a cost that is told in numbers
Option = tuple[tuple[str, ...], str]  # (settings, what they cost)
Options = Iterator[Option]


@dataclass(frozen=True)
class Change:
    """One change of a configuration, and what it costs."""

    settings: tuple[str, ...]
    cost: str
    memory: Memory

    def __str__(self) -> str:
        return f"{' '.join(self.settings)} ({self.memory.least / 1e9:.1f} GB; {self.cost})"


def memory_of(task: TaskKind, config: Config, how: Execution, layers: int | None = None) -> Memory:
    """What a process of this run takes; `how.accumulation` is what its micro-batch asks for."""
    training = config.training
    accumulation = micro_batches_each(training, how.micro_batch, how.world_size)
    if how.world_size > 1 and training.gradient_reduction == "fp32":
        accumulation = max(2, accumulation)  # gradients travel in fp32, as if they were summed up
    memory = task.memory(config, replace(how, accumulation=accumulation), layers)
    if how.world_size == 1:
        return memory
    memory = replace(memory, gradients=2 * memory.gradients)  # they leave as copies, whose memory is another; measured
    if training.sharding == "none":
        return memory
    return _spread(memory, task.parameters(config), training.sharding, how)


def _spread(memory: Memory, parts: dict[str, int], sharding: str, how: Execution) -> Memory:
    """With each process keeping its part of the fp32 weights and moments, and no copy of a snapshot."""
    ranks, weights, gradients = how.world_size, memory.weights, memory.gradients
    if sharding == "full":
        blocks = sum(numbers for part, numbers in parts.items() if part not in OUTSIDE_BLOCKS)
        cut = blocks / max(1, sum(parts.values()))
        gradients -= int(cut * gradients / 2 * (1 - 1 / ranks))
        weights -= int(cut * weights * (1 - 1 / ranks))
        weights += FULL * sum(parts.values())  # it begins whole, in memory that stays taken; measured
    elif how.precision == "bf16":
        masters = FULL * parts.get("adapter", sum(parts.values()))
        weights -= int(masters * (1 - 1 / ranks))
    return replace(memory, weights=weights, gradients=gradients, optimizer=memory.optimizer // ranks, snapshot=0)


def fits(memory: Memory, available: int) -> bool:
    """Whether a run may be begun; the copy of a snapshot is left out where there is no room for it."""
    return memory.least * MARGIN <= available


def fitting_micro_batches(
    task: TaskKind,
    config: Config,
    how: Execution,
    available: int,
    shortage: Shortage,
    warn: Callable[[str], None],
) -> list[int]:
    """The micro-batches to choose from, in examples, smallest first.

    Where none fits: `refuse` raises ConfigError, naming what would; `begin` takes the largest part that does, or 1;
    `report` takes the smallest as it is.
    """
    choices = micro_batch_choices(config.training, config.window, how.world_size)
    fitting = [size for size in choices if fits(memory_of(task, config, replace(how, micro_batch=size)), available)]
    if fitting:
        return fitting
    if shortage == "report":
        return choices[:1]
    needed = memory_of(task, config, replace(how, micro_batch=choices[0]))
    short = f"the run needs about {needed.least / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available"
    if shortage == "refuse":
        changes = "; or ".join(str(change) for change in changes_that_fit(task, config, how, available))
        remedy = f"it fits with {changes}" if changes else "choose a much smaller model"
        raise ConfigError(f"{short}; {remedy}; --force begins all the same.")
    parts = [size for size in _halves(choices[0]) if size < choices[0]]
    sizes = [s for s in parts if fits(memory_of(task, config, replace(how, micro_batch=s)), available)]
    size = (sizes or [min(parts, default=choices[0])])[0]
    warn(f"{short}: it begins, as asked, in micro-batches of {size} and the same batch.")
    return [size]


def changes_that_fit(task: TaskKind, config: Config, how: Execution, available: int) -> list[Change]:
    """Up to three changes that each make the run fit, the cheapest first; together where none does alone."""
    found: list[Change] = []
    for kind in KINDS:
        tried = (_tried(task, config, how, settings, cost) for settings, cost in kind(config, how))
        if change := next((c for c in tried if c is not None and fits(c.memory, available)), None):
            found.append(change)
    return found[:MOST_CHANGES] or _together(task, config, how, available)


def _together(task: TaskKind, config: Config, how: Execution, available: int) -> list[Change]:
    """One change of several kinds: each as far as it goes until it fits, then without those it fits without."""
    parts: list[Option] = []
    for kind in KINDS:
        furthest: Option | None = None
        for option in kind(change_config(config, _merged(parts)), how):
            change = _joined(task, config, how, [*parts, option])
            if change is None:
                continue
            furthest = option
            if fits(change.memory, available):
                return [_spared(task, config, how, available, [*parts, option])]
        if furthest:
            parts.append(furthest)
    return []


def _spared(task: TaskKind, config: Config, how: Execution, available: int, parts: list[Option]) -> Change:
    for part in reversed(parts[:-1]):
        fewer = [other for other in parts if other is not part]
        change, changed = _joined(task, config, how, fewer), change_config(config, _merged(fewer))
        same_step = _step_tokens(changed) == _step_tokens(config)
        if change and same_step and fits(change.memory, available):
            parts = fewer
    change = _joined(task, config, how, parts)
    assert change is not None
    return change


def _joined(task: TaskKind, config: Config, how: Execution, parts: list[Option]) -> Change | None:
    return _tried(task, config, how, _merged(parts), "; ".join(dict.fromkeys(cost for _, cost in parts)))


def _merged(parts: list[Option]) -> tuple[str, ...]:
    """All settings; of those of one key the last."""
    return tuple({setting.partition("=")[0]: setting for settings, _ in parts for setting in settings}.values())


def _step_tokens(config: Config) -> int:
    return effective_batch(config.training) * config.window


def _tried(task: TaskKind, config: Config, how: Execution, settings: tuple[str, ...], cost: str) -> Change | None:
    try:
        changed = change_config(config, settings)
    except ConfigError:  # a combination that the model's shape forbids
        return None
    training = changed.training
    size = micro_batch_choices(training, changed.window, how.world_size)[0]
    precision = how.precision if training.wanted_precision == "auto" else training.wanted_precision
    optimizer = how.optimizer if training.optimizer == "auto" else training.optimizer
    how = replace(how, micro_batch=size, precision=precision, optimizer=optimizer)
    memory = memory_of(task, changed, how)
    if FEWER in cost:
        now, then = (sum(task.parameters(c).values()) / 1e6 for c in (config, changed))
        cost = cost.replace(FEWER, f"{then:.0f}M parameters instead of {now:.0f}M")
    return Change(settings, cost, memory)


def _smaller_pieces(config: Config, how: Execution) -> Options:
    if config.training.batch_size == "auto":
        return
    batch = effective_batch(config.training)
    for size in _halves(config.training.batch_size)[1:]:
        if batch % size == 0:
            settings = (f"training.batch_size={size}", f"{ACCUMULATION}={batch // size}")
            yield settings, "the same batch in more pieces, a few per cent slower"


def _bf16(config: Config, how: Execution) -> Options:
    if how.precision == "fp32" and has_native_bf16():
        yield ("training.precision=bf16",), "products in bf16, faster here"


def _sharded(config: Config, how: Execution) -> Options:
    training = config.training
    if how.world_size > 1 and training.sharding == "none":
        yield ("training.sharding=optimizer",), "training waits while snapshots are written"
    plain = training.master_weights == training.optimizer_state == "fp32" and training.compile != "on"
    if how.world_size > 1 and training.sharding != "full" and plain:
        yield ("training.sharding=full",), "weights travel for every block of every micro-batch"


def _checkpointing(config: Config, how: Execution) -> Options:
    if not config.model.gradient_checkpointing:
        yield ("model.gradient_checkpointing=true",), "activations computed twice, about a third slower"


def _muon(config: Config, how: Execution) -> Options:
    if how.optimizer == "adamw":
        yield ("training.optimizer=muon",), "another optimizer, with a learning rate of its own"


def _shorter(config: Config, how: Execution) -> Options:
    for part in PARTS:
        if (window := config.window // part) >= LEAST_WINDOW:
            accumulation = config.training.gradient_accumulation_steps * part
            yield (f"data.max_length={window}", f"{ACCUMULATION}={accumulation}"), f"a context of {window} tokens"


def _shallower(config: Config, how: Execution) -> Options:
    for part in PARTS:
        if config.model.n_layers >= part:
            yield (f"model.n_layers={config.model.n_layers // part}",), FEWER


def _narrower(config: Config, how: Execution) -> Options:
    model = config.model
    for part in PARTS:
        if not (model.d_model % part or model.n_heads % part or model.kv_heads % part):
            settings = [f"model.{key}={max(1, getattr(model, key) // part)}" for key in ("d_model", "d_ff", "n_heads")]
            settings += [f"model.n_kv_heads={model.kv_heads // part}"] if model.n_kv_heads else []
            yield tuple(settings), FEWER


# Kinds of changes: first what only costs time, then what costs quality; each has its options, the mildest first.
KINDS = (_smaller_pieces, _bf16, _sharded, _checkpointing, _muon, _shorter, _shallower, _narrower)


def _halves(size: int) -> list[int]:
    """`size`, its half, its quarter, ... down to 1."""
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes

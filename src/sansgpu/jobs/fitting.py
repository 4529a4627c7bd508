"""Whether a run fits into memory, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sansgpu.config import Config, ConfigError, change_config
from sansgpu.machine.memory import Execution, Memory, effective_batch, micro_batch_choices
from sansgpu.machine.probe import has_native_bf16
from sansgpu.tasks import TaskKind

Shortage = Literal["refuse", "begin", "report"]

MARGIN = 1.05  # the estimate is within a few per cent of what is measured; the rest of the machine moves too
PARTS = (2, 4, 8)  # a half, a quarter, an eighth are tried
LEAST_WINDOW = 32
MOST_CHANGES = 3  # are named where a run does not fit


@dataclass(frozen=True)
class Change:
    """One change of a configuration, and what it costs."""

    settings: tuple[str, ...]
    cost: str
    memory: Memory

    def __str__(self) -> str:
        return f"{' '.join(self.settings)} ({self.memory.least / 1e9:.1f} GB; {self.cost})"


def memory_of(task: TaskKind, config: Config, how: Execution) -> Memory:
    """What a run of this configuration takes; `how.accumulation` is what its micro-batch asks for."""
    accumulation = -(-effective_batch(config.training) // how.micro_batch)
    return task.memory(config, replace(how, accumulation=accumulation))


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
    choices = micro_batch_choices(config.training, config.window)
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
    together: dict[str, str] = {}
    costs: list[str] = []
    for kind in _candidates(config, how):
        tried = (_tried(task, config, how, settings, cost) for settings, cost in kind)
        if change := next((c for c in tried if c is not None and fits(c.memory, available)), None):
            found.append(change)
    if found:
        return found[:MOST_CHANGES]
    for kind in _candidates(config, how):
        for settings, cost in kind:
            together |= {setting.partition("=")[0]: setting for setting in settings}
            costs.append(cost)
            change = _tried(task, config, how, tuple(together.values()), ", ".join(dict.fromkeys(costs)))
            if change is not None and fits(change.memory, available):
                return [change]
    return []


def _tried(task: TaskKind, config: Config, how: Execution, settings: tuple[str, ...], cost: str) -> Change | None:
    try:
        changed = change_config(config, settings)
    except ConfigError:  # a combination that the model's shape forbids
        return None
    training = changed.training
    size = micro_batch_choices(training, changed.window)[0]
    precision = how.precision if training.wanted_precision == "auto" else training.wanted_precision
    optimizer = how.optimizer if training.optimizer == "auto" else training.optimizer
    how = replace(how, micro_batch=size, precision=precision, optimizer=optimizer)
    memory = memory_of(task, changed, how)
    if "parameters" in cost:
        cost = f"{sum(task.parameters(changed).values()) / 1e6:.0f}M parameters instead of "
        cost += f"{sum(task.parameters(config).values()) / 1e6:.0f}M"
    return Change(settings, cost, memory)


def _candidates(config: Config, how: Execution) -> Iterator[list[tuple[tuple[str, ...], str]]]:
    """Kinds of changes, settings and their cost: first what only costs time, then what costs quality; of each kind the
    mildest first.
    """
    model, training, window = config.model, config.training, config.window
    batch, accumulated = effective_batch(training), "training.gradient_accumulation_steps"
    if training.batch_size != "auto":
        cost = "the same batch in more pieces, a few per cent slower"
        sizes = _halves(training.batch_size)[1:]
        yield [((f"training.batch_size={size}", f"{accumulated}={-(-batch // size)}"), cost) for size in sizes]
    if how.precision == "fp32" and has_native_bf16():
        yield [(("training.precision=bf16",), "products in bf16, faster here")]
    if not model.gradient_checkpointing:
        yield [(("model.gradient_checkpointing=true",), "activations computed twice, about a third slower")]
    if how.optimizer == "adamw":
        yield [(("training.optimizer=muon",), "another optimizer, with a learning rate of its own")]
    yield [
        (
            (f"data.max_length={window // part}", f"{accumulated}={training.gradient_accumulation_steps * part}"),
            f"a context of {window // part} tokens",
        )
        for part in PARTS
        if window // part >= LEAST_WINDOW
    ]
    yield [((f"model.n_layers={model.n_layers // part}",), "parameters") for part in PARTS if model.n_layers >= part]
    yield [
        (
            (
                f"model.d_model={model.d_model // part}",
                f"model.d_ff={max(1, model.d_ff // part)}",
                f"model.n_heads={model.n_heads // part}",
                *((f"model.n_kv_heads={model.kv_heads // part}",) if model.n_kv_heads else ()),
            ),
            "parameters",
        )
        for part in PARTS
        if not (model.d_model % part or model.n_heads % part or model.kv_heads % part)
    ]


def _halves(size: int) -> list[int]:
    """`size`, its half, its quarter, ... down to 1."""
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes

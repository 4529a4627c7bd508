"""What `sansgpu tune` may change: keys of the schema with the values they may have. A file -> Space."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sansgpu.config.by_task import FINE_TUNING, GRAPH, PRETRAIN, kinds_with, label
from sansgpu.config.errors import ConfigError
from sansgpu.config.load import change_config, describe
from sansgpu.config.parse import Values, read_values
from sansgpu.config.schema import Config

Number = int | float
Choice = int | float | str | bool | None

WIDE, NARROW = 4.0, 5.0  # times the configured learning rate, up and down: from scratch, and of a trained model
RANGES, EXTRAS = ("log", "float", "int"), ("step", "log")
INSIDE = 0.382  # a place in a range that is no whole number where the ends are

# Of a run's length, which is the same for all trials; num_epochs may be searched all the same.
_LENGTHS = ("training.max_steps", "training.max_tokens", "training.max_hours", "training.until")
_OURS = {
    f"training.{key}": "the search sets it for every trial"
    for key in ("eval_steps", "save_steps", "keep_last", "report_to", "logging_dir", "checkpoint_dir")
} | {f"training.{key}": "it changes nothing that is learned" for key in ("sample_tokens", "sample_prompt", "threads")}
_WEIGHTS = ("training.mlm_weight", "training.mnm_weight", "training.eval_batches")  # of what is measured
_TUNABLE_DATA = ("data.vocab_size", "data.tokenizer", "data.tokenizer_sample_mb", "data.max_length")
# With another vocabulary a token is another piece of text, so that losses a token do not compare.
_VOCABULARY = ("data.vocab_size", "data.tokenizer", "data.tokenizer_sample_mb", "model.vocab_size")


@dataclass(frozen=True)
class Parameter:
    """One key and its values: `choices`, or numbers from `low` to `high`, both included."""

    key: str
    choices: tuple[Choice, ...] = ()
    low: Number = 0
    high: Number = 0
    whole: bool = False
    log: bool = False
    step: Number | None = None

    def contains(self, value: object) -> bool:
        """Whether a trial may have this value."""
        if self.choices:
            return any(
                value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in self.choices
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / self.step if self.step else 0.0
        return math.isclose(steps, round(steps), abs_tol=1e-9)

    def at(self, place: float) -> Choice:
        """The value at a place between 0 and 1: one of the choices, or so far up the range."""
        if self.choices:
            return self.choices[min(int(place * len(self.choices)), len(self.choices) - 1)]
        if self.log:
            value: float = self.low * (self.high / self.low) ** place
        else:
            value = self.low + place * (self.high - self.low)
        if self.step:
            value = self.low + self.step * round((value - self.low) / self.step)
        return min(max(round(value) if self.whole else value, self.low), self.high)

    def to_json(self) -> Values:
        """As a file says it."""
        if self.choices:
            return {"choices": list(self.choices)}
        more = {"log": True} if self.log else {"step": self.step} if self.step else {}
        return {"int" if self.whole else "float": [self.low, self.high], **more}

    def __str__(self) -> str:
        if self.choices:
            return ", ".join("null" if choice is None else str(choice) for choice in self.choices)
        how = ", by its logarithm" if self.log else f", in steps of {self.step:g}" if self.step else ""
        return f"{self.low:.4g} to {self.high:.4g}{how}"


Space = dict[str, Parameter]


def spread(space: Space, number: int) -> Values:
    """The values of point `number` of a sequence that fills the space evenly, begun in its middle.

    Roberts' additive recurrence: no dimension's steps are close to a fraction with a small denominator.
    """
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (len(space) + 1))
    places = ((0.5 + number * root ** -(n + 1)) % 1 for n in range(len(space)))
    return {parameter.key: parameter.at(place) for parameter, place in zip(space.values(), places, strict=True)}


def measure_of(space: Space) -> str:
    """What trials are compared by: the loss, or with other vocabularies bits per byte."""
    return "bits_per_byte" if any(key in _VOCABULARY for key in space) else "loss"


def load_space(path: Path | None, config: Config) -> Space:
    """The space of a file, each value checked against the schema; without one what pays most for such a run.

    Raises ConfigError.
    """
    values = read_values(path) if path else _usual(config)
    where = str(path) if path else "the usual search space"
    if not values:
        raise ConfigError(f"{where} is empty; name a key and its values, as `learning_rate: {{log: [1e-4, 1e-2]}}`.")
    space: Space = {}
    for name, values_of in values.items():
        key = _key(str(name), config, where)
        if key in space:
            raise ConfigError(f"{where}: {key} is given twice; leave one out.")
        space[key] = _parameter(key, values_of, config, where)
    return space


def _usual(config: Config) -> Values:
    """What is searched where nobody says what."""
    training, model = config.training, config.model
    rate, warmup, epochs = training.learning_rate, training.warmup_steps, training.num_epochs
    if config.kind in FINE_TUNING:
        values: Values = {"training.learning_rate": {"log": [rate / NARROW, rate * NARROW]}}
        if epochs and not any((training.max_steps, training.max_tokens, training.time_limited)):
            values["training.num_epochs"] = _around(epochs)
        values["training.warmup_steps"] = _around(warmup) if warmup else [0, 10, 50]
        if kinds_with("model.adapter") and model.adapter != "none" and config.kind in kinds_with("model.adapter"):
            values["model.lora_rank"] = _around(model.lora_rank)
        return values
    decay = training.weight_decay
    values = {
        "training.learning_rate": {"log": [rate / WIDE, rate * WIDE]},
        "training.gradient_accumulation_steps": _around(training.gradient_accumulation_steps),
        "training.weight_decay": {"log": [decay / WIDE, decay * WIDE]} if decay else [0.0, 0.01, 0.1],
    }
    if warmup:
        values["training.warmup_steps"] = sorted({max(1, warmup // 4), warmup, 2 * warmup})
    if config.kind == GRAPH:
        values["model.dropout"] = sorted({0.0, 0.1, 0.2, model.dropout})
    return values


def _around(value: Number) -> list[Number]:
    """Half, the same and double."""
    half = max(1, value // 2) if isinstance(value, int) else value / 2
    return sorted({half, value, 2 * value})


def _key(name: str, config: Config, where: str) -> str:
    """The key that a file means by `name`: a whole one, or its last part where that is unambiguous."""
    keys = [key for key, _, _ in describe()]
    found = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] == name]
    acting = [key for key in found if config.kind in kinds_with(key)]
    if len(acting) > 1:
        raise ConfigError(f"{where}: {name} may be {' or '.join(acting)}; write which.")
    if not found:
        last = {key.rpartition(".")[2]: key for key in reversed(keys)}
        near = difflib.get_close_matches(name, [*keys, *last], n=1, cutoff=0.5)
        hint = f"; did you mean {last.get(near[0], near[0])}?" if near else "; see docs/configuration.md for all keys."
        raise ConfigError(f"{where}: unknown key {name}{hint}")
    if not acting:
        raise ConfigError(f"{where}: {found[0]} does nothing in task {label(config.kind)}; leave it out.")
    if why := _refused(acting[0], config.kind):
        raise ConfigError(f"{where}: {acting[0]} cannot be searched, as {why}; leave it out.")
    return acting[0]


def _refused(key: str, kind: str) -> str | None:
    """Why a key makes no search."""
    if key in ("task", "training.device", "training.force_cpu"):
        return "all trials are one kind of run on one device"
    if key in _LENGTHS:
        return "all trials are to have the same length"
    if key in _OURS:
        return _OURS[key]
    if key in _WEIGHTS or (key.startswith("data.") and (kind != PRETRAIN or key not in _TUNABLE_DATA)):
        return "it changes what the loss is measured on, and losses would not compare"
    return None


def _parameter(key: str, values: object, config: Config, where: str) -> Parameter:
    def checked(value: object) -> Any:
        return _in_schema(key, value, config, where)

    if isinstance(values, list):
        choices = tuple(checked(value) for value in values)
        if len(choices) < 2:
            raise ConfigError(f"{where}: {key} has {'one choice' if choices else 'no choices'}; give at least two.")
        if odd := [c for c in choices if not isinstance(c, (int, float, str, type(None)))]:
            raise ConfigError(
                f"{where}: {key} has the choice {odd[0]}; choices are numbers, words, true, false and null."
            )
        if len(set(choices)) < len(choices):
            raise ConfigError(f"{where}: {key} has one of its choices {choices} twice; leave it out.")
        return Parameter(key, choices)
    form = next((form for form in RANGES if isinstance(values, dict) and isinstance(values.get(form), list)), None)
    if not isinstance(values, dict) or form is None or (unknown := set(values) - {form, *EXTRAS}):
        odd_ones = (
            f" ({', '.join(sorted(map(str, unknown)))} is not known)" if isinstance(values, dict) and form else ""
        )
        raise ConfigError(
            f"{where}: {key} is {json.dumps(values, default=str)}{odd_ones}; write a list of choices, "
            "{log: [low, high]}, {float: [low, high]} or {int: [low, high]}, the last two with `step` or `log: true` "
            "where wanted."
        )
    return _range(key, form, values, checked, where)


def _range(key: str, form: str, values: Values, checked: Callable[[object], Any], where: str) -> Parameter:
    ends = [end for end in map(_number, values[form]) if end is not None]
    if not len(ends) == len(values[form]) == 2 or not ends[0] < ends[1]:
        raise ConfigError(f"{where}: {key} has the range {values[form]}; give two numbers, the lower one first.")
    low, high = ends
    log = form == "log" or values.get("log", False)
    step = _number(values["step"]) if "step" in values else None
    if not isinstance(log, bool) or (log and step is not None):
        raise ConfigError(f"{where}: {key} is searched by its logarithm or in steps; leave out the one or the other.")
    if log and low <= 0:
        raise ConfigError(f"{where}: {key} begins at {low:g}, which has no logarithm; begin above 0.")
    if "step" in values and (step is None or not 0 < step <= high - low):
        raise ConfigError(f"{where}: {key} has the step {values['step']}; give one above 0 and within its range.")
    whole = form == "int"
    if whole and any(number is not None and number != int(number) for number in (low, high, step)):
        raise ConfigError(f"{where}: {key} is int with {values[form]}; give whole numbers, or write float.")
    if whole:
        low, high, step = int(low), int(high), None if step is None else int(step)
    else:
        checked(low + INSIDE * (high - low) if step is None else low + step)
    checked(low)
    checked(high)
    return Parameter(key, (), low, high, whole, log, step)


def _number(value: object) -> Number | None:
    """YAML 1.1 reads 5e-4 as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = value if isinstance(value, int) else float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _in_schema(key: str, value: object, config: Config, where: str) -> Any:
    """`value` as the schema reads it. Raises ConfigError where it does not allow it."""
    try:
        changed = change_config(config, (f"{key}={json.dumps(value, default=str)}",))
    except ConfigError as error:
        reason = str(error).removeprefix("the configuration: ").rstrip(".")
        whole = isinstance(value, float) and "integer" in reason
        hint = "; search whole numbers by {int: [low, high]}" if whole else "; leave such values out of the space"
        raise ConfigError(f"{where}: {reason}{hint}.") from None
    section, _, name = key.rpartition(".")
    return getattr(getattr(changed, section), name)

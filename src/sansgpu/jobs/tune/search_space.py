"""The search space of `sansgpu tune`: keys of the schema with their candidate values."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sansgpu.config.errors import ConfigError
from sansgpu.config.load import change_config, setting
from sansgpu.config.parse import Values, read_values
from sansgpu.config.schema import Config
from sansgpu.config.section import CHANGES_LOSS, all_keys, counterpart, declared
from sansgpu.config.tasks import BITS_PER_BYTE, LOSS

Number = int | float
Choice = int | float | str | bool | None

WIDE, NARROW = 4.0, 5.0  # search learning rates within this factor of the configured one: from scratch; fine-tuning
RANGE_TYPES, RANGE_OPTIONS = ("log", "float", "int"), ("step", "log")
INTERIOR_POINT = 0.382  # relative position in a range; not an integer if the bounds are integers

# Keys that change how much text a token covers, so losses per token are not comparable between trials.
_VOCABULARY_KEYS = ("data.vocab_size", "data.tokenizer", "data.tokenizer_sample_mb", "model.vocab_size")


@dataclass(frozen=True)
class SearchParameter:
    """One key and its candidate values: `choices`, or numbers from `low` to `high` inclusive."""

    key: str
    choices: tuple[Choice, ...] = ()
    low: Number = 0
    high: Number = 0
    is_integer: bool = False
    log: bool = False
    step: Number | None = None

    def contains(self, value: object) -> bool:
        if self.choices:
            return any(
                value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in self.choices
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / self.step if self.step else 0.0
        return math.isclose(steps, round(steps), abs_tol=1e-9)

    def at(self, position: float) -> Choice:
        """Maps a position between 0 and 1 to a choice or to a value in the range."""
        if self.choices:
            return self.choices[min(int(position * len(self.choices)), len(self.choices) - 1)]
        if self.log:
            value: float = self.low * (self.high / self.low) ** position
        else:
            value = self.low + position * (self.high - self.low)
        if self.step:
            value = self.low + self.step * round((value - self.low) / self.step)
        return min(max(round(value) if self.is_integer else value, self.low), self.high)

    def extremes(self) -> tuple[Choice, ...]:
        """Returns the lowest and the highest value, or all choices if some are not numbers."""
        if not self.choices:
            return self.low, self.high
        numbers = [c for c in self.choices if isinstance(c, (int, float)) and not isinstance(c, bool)]
        return (min(numbers), max(numbers)) if len(numbers) == len(self.choices) else self.choices

    def to_json(self) -> Values:
        """Returns the parameter in the format of a space file."""
        if self.choices:
            return {"choices": list(self.choices)}
        more = {"log": True} if self.log else {"step": self.step} if self.step else {}
        return {"int" if self.is_integer else "float": [self.low, self.high], **more}

    def __str__(self) -> str:
        if self.choices:
            return ", ".join("null" if choice is None else str(choice) for choice in self.choices)
        scale = ", log scale" if self.log else f", in steps of {self.step:g}" if self.step else ""
        return f"{self.low:.4g} to {self.high:.4g}{scale}"


Space = dict[str, SearchParameter]


def spaced_values(space: Space, number: int) -> Values:
    """Returns point `number` of a low-discrepancy sequence that starts in the middle of the space.

    The sequence is Roberts' R_d, an additive recurrence that generalizes the golden ratio.
    """
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (len(space) + 1))
    places = ((0.5 + number * root ** -(n + 1)) % 1 for n in range(len(space)))
    return {parameter.key: parameter.at(place) for parameter, place in zip(space.values(), places, strict=True)}


def measure_of(space: Space) -> str:
    """Returns the metric to compare trials by: the loss, or bits per byte if vocabularies differ."""
    return (BITS_PER_BYTE if any(key in _VOCABULARY_KEYS for key in space) else LOSS).name


def load_space(path: Path | None, config: Config) -> Space:
    """Loads a space and validates its values with the schema. None is the default space for the kind of run.

    Raises ConfigError.
    """
    values = read_values(path) if path else _default_space(config)
    where = str(path) if path else "the default search space"
    if not values:
        raise ConfigError(f"{where} is empty; name a key and its values, e.g. `learning_rate: {{log: [1e-4, 1e-2]}}`.")
    space: Space = {}
    for name, candidates in values.items():
        key = _key(str(name), config, where)
        if key in space:
            raise ConfigError(f"{where}: {key} is duplicated; remove one of the two.")
        space[key] = _parameter(key, candidates, config, where)
    return space


def _default_space(config: Config) -> Values:
    training, model = config.training, config.model
    rate, warmup, epochs = training.learning_rate, training.warmup_steps, training.num_epochs
    if config.settings.fine_tunes:
        values: Values = {"training.learning_rate": {"log": [rate / NARROW, rate * NARROW]}}
        if epochs and not any((training.max_steps, training.max_tokens, training.time_limited)):
            values["training.num_epochs"] = _around(epochs)
        if training.warmup_ratio is None:
            values["training.warmup_steps"] = _around(warmup) if warmup else [0, 10, 50]
        if model.adapter in ("lora", "dora"):
            values["model.lora_rank"] = _around(model.lora_rank)
        return values
    decay = training.weight_decay
    values = {
        "training.learning_rate": {"log": [rate / WIDE, rate * WIDE]},
        "training.gradient_accumulation_steps": _around(training.gradient_accumulation_steps),
        "training.weight_decay": {"log": [decay / WIDE, decay * WIDE]} if decay else [0.0, 0.01, 0.1],
    }
    if warmup and training.warmup_ratio is None:
        values["training.warmup_steps"] = sorted({max(1, warmup // 4), warmup, 2 * warmup})
    if config.settings.default("model", "dropout", 0.0):
        values["model.dropout"] = sorted({0.0, 0.1, 0.2, model.dropout})
    return values


def _around(value: Number) -> list[Number]:
    """Returns half the value, the value and its double."""
    half = max(1, value // 2) if isinstance(value, int) else value / 2
    return sorted({half, value, 2 * value})


def _key(name: str, config: Config, where: str) -> str:
    """Resolves a full key, or the last part of a key if it is unambiguous."""
    keys = [key for key, _ in all_keys(type(config))]
    found = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] == name]
    acting = [key for key in found if config.acts(key)]
    if len(acting) > 1:
        raise ConfigError(f"{where}: {name} may be {' or '.join(acting)}; write the full key.")
    if not found:
        last = {key.rpartition(".")[2]: key for key in reversed(keys)}
        other = counterpart(type(config), name.rpartition(".")[2])
        near = [other] if other else difflib.get_close_matches(name, [*keys, *last], n=1, cutoff=0.5)
        hint = f"; did you mean {last.get(near[0], near[0])}?" if near else "; see docs/configuration.md for all keys."
        raise ConfigError(f"{where}: unknown key {name}{hint}")
    if not acting:
        raise ConfigError(f"{where}: {found[0]} has no effect in task {config.settings.display_name}; remove it.")
    if why := _unsearchable(acting[0], config):
        raise ConfigError(f"{where}: {acting[0]} cannot be searched, because {why}; remove it.")
    return acting[0]


def _unsearchable(key: str, config: Config) -> str | None:
    """Returns why a key cannot be searched, or None."""
    field = dict(all_keys(type(config)))[key]
    if reason := declared(field, "unsearchable"):
        return str(reason)
    changes_windows = key.startswith("data.") and (config.settings.varying_length or not declared(field, "tunable"))
    if changes_windows or (key in _VOCABULARY_KEYS and BITS_PER_BYTE not in config.settings.metrics):
        return str(CHANGES_LOSS["unsearchable"])
    return None


def _parameter(key: str, values: object, config: Config, where: str) -> SearchParameter:
    def checked(value: object) -> Any:
        return _in_schema(key, value, config, where)

    if isinstance(values, list):
        choices = tuple(checked(value) for value in values)
        if len(choices) < 2:
            raise ConfigError(f"{where}: {key} has {'one choice' if choices else 'no choices'}; list at least two.")
        if odd := [c for c in choices if not isinstance(c, (int, float, str, type(None)))]:
            raise ConfigError(
                f"{where}: {key} has the choice {odd[0]}; use only numbers, strings, true, false and null."
            )
        if len(set(choices)) < len(choices):
            raise ConfigError(f"{where}: {key} has a repeated value in its choices {choices}; remove it.")
        return SearchParameter(key, choices)
    form = next((form for form in RANGE_TYPES if isinstance(values, dict) and isinstance(values.get(form), list)), None)
    if not isinstance(values, dict) or form is None or (unknown := set(values) - {form, *RANGE_OPTIONS}):
        unknown_keys = (
            f" ({', '.join(sorted(map(str, unknown)))} is unknown)" if isinstance(values, dict) and form else ""
        )
        raise ConfigError(
            f"{where}: {key} is {json.dumps(values, default=str)}{unknown_keys}; write a list of choices, "
            "{log: [low, high]}, {float: [low, high]} or {int: [low, high]}; float and int also allow `step` or "
            "`log: true`."
        )
    return _range(key, form, values, checked, where)


def _range(key: str, form: str, values: Values, checked: Callable[[object], Any], where: str) -> SearchParameter:
    ends = [end for end in map(_number, values[form]) if end is not None]
    if not len(ends) == len(values[form]) == 2 or not ends[0] < ends[1]:
        raise ConfigError(f"{where}: {key} has the range {values[form]}; write two numbers, the lower one first.")
    low, high = ends
    log = form == "log" or values.get("log", False)
    step = _number(values["step"]) if "step" in values else None
    if not isinstance(log, bool) or (log and step is not None):
        raise ConfigError(f"{where}: {key} has both log and step, which are mutually exclusive; remove one of them.")
    if log and low <= 0:
        raise ConfigError(f"{where}: {key} starts at {low:g}, but a log scale needs a lower bound above 0; raise it.")
    if "step" in values and (step is None or not 0 < step <= high - low):
        raise ConfigError(f"{where}: {key} has the step {values['step']}; choose one above 0 and within its range.")
    is_integer = form == "int"
    if is_integer and any(number is not None and number != int(number) for number in (low, high, step)):
        raise ConfigError(f"{where}: {key} has type int but the range {values[form]}; use integers, or write float.")
    if is_integer:
        low, high, step = int(low), int(high), None if step is None else int(step)
    else:
        checked(low + INTERIOR_POINT * (high - low) if step is None else low + step)
    checked(low)
    checked(high)
    return SearchParameter(key, (), low, high, is_integer, log, step)


def _number(value: object) -> Number | None:
    """Converts a value to a number, or None. YAML 1.1 reads 5e-4 as a string."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = value if isinstance(value, int) else float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _in_schema(key: str, value: object, config: Config, where: str) -> Any:
    """Returns `value` as validated by the schema. Raises ConfigError if it is invalid."""
    try:
        changed = change_config(config, [(key, value)])
    except ConfigError as error:
        reason = str(error).removeprefix("the configuration: ").rstrip(".")
        needs_integer = isinstance(value, float) and "integer" in reason
        hint = (
            "; search integers with {int: [low, high]}"
            if needs_integer
            else "; remove these values from the search space"
        )
        raise ConfigError(f"{where}: {reason}{hint}.") from None
    return setting(changed, key)

"""Checks that a config.yaml is the one that its run was trained with.

`identity` is recorded in every snapshot and in the mark of a run's folder. If config.yaml lacks a recorded key, it was
truncated. If a key that determines the model or the data order has a different value, the file belongs to a different
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic.fields import FieldInfo

from sansgpu.config.errors import ConfigError
from sansgpu.config.load import acting_values, flatten
from sansgpu.config.other_names import own_name
from sansgpu.config.parse import Values
from sansgpu.config.schema import Config
from sansgpu.config.section import TOP_LEVEL_KEYS, all_keys, declared

_BATCH_KEYS = "training.batch_size", "training.gradient_accumulation_steps"
_EXAMPLES_PER_STEP = " x ".join(_BATCH_KEYS)


def identity(config: Config) -> Values:
    """Returns `fixed`, the values that determine model and data order, and `free`, the keys that may change."""
    flat = _flat(acting_values(config))
    fields = dict(all_keys(type(config)))
    fixed = {key: value for key, value in flat.items() if key == _EXAMPLES_PER_STEP or _is_fixed(key, fields[key])}
    return {"fixed": fixed, "free": [key for key in flat if key not in fixed]}


def require_identity(file: Path, values: Values, recorded: Sequence[Values]) -> None:
    """Raises ConfigError if the `values` of a run's configuration `file` match none of the `recorded` identities."""
    found = [_difference(one, values) for one in recorded]
    if found and all(found):
        raise ConfigError(
            f"{file} is not the configuration that its run was trained with: {found[0]}; restore the file, or resume "
            "with the original configuration and use --set for changes."
        )


def _difference(recorded: Values, values: Values) -> str | None:
    """Returns a clause naming the first key that differs, or None."""
    fixed, free = recorded.get("fixed"), recorded.get("free")
    if not isinstance(fixed, dict) or not isinstance(free, list) or not all(isinstance(key, str) for key in free):
        return None  # not written by `identity`, so there is nothing to compare
    fixed = dict(own_name(key, value) for key, value in fixed.items())  # a key may have been renamed since
    free = [own_name(key, None)[0] for key in free]
    flat = _flat(values)
    if missing := next((key for key in (*fixed, *free) if key not in flat and key != _EXAMPLES_PER_STEP), None):
        return f"it is incomplete, because {missing} is missing"
    for key, value in fixed.items():
        if not _same(flat.get(key), value):
            return f"{key} is {flat.get(key)}, but the run was trained with {value}"
    return None


def _is_fixed(key: str, field: FieldInfo) -> bool:
    """Returns whether a key determines the model or the data order: by default, if it is in section model or data."""
    return bool(declared(field, "fixed", key.startswith(("model.", "data."))))


def _flat(values: Values) -> Values:
    """Flattens values to `section.key`, and adds the number of examples per step."""
    named = dict(own_name(key, value) for key, value in flatten(values).items())
    flat = {f"training.{key}" if key in TOP_LEVEL_KEYS else key: value for key, value in named.items()}
    size, accumulated = (flat.get(key) for key in _BATCH_KEYS)
    if isinstance(accumulated, int):
        flat[_EXAMPLES_PER_STEP] = size * accumulated if isinstance(size, int) else accumulated
    return flat


def _same(one: object, other: object) -> bool:
    """Returns True for equal values. YAML reads 1e-3 as a string, so numbers are also compared as floats."""
    if one == other:
        return True
    try:
        return not isinstance(one, bool) and float(one) == float(other)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False

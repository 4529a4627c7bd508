"""Checks that a config.yaml is the one that its run was trained with.

`identity` is recorded in every snapshot and in the mark of a run's folder. If config.yaml lacks a recorded key, it was
truncated. If a key that determines the model or the data order has a different value, the file belongs to a different
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sansgpu.config.errors import ConfigError
from sansgpu.config.load import acting_values, flatten
from sansgpu.config.schema import Config
from sansgpu.config.section import TOP_LEVEL_KEYS

Values = dict[str, Any]

# Keys of model and data that change neither the model nor the data order. A base model and a quality model may be
# moved, because every snapshot has a fingerprint of the weights and the data.
_CHANGEABLE = {
    "model.name_or_path", "model.gradient_checkpointing", "model.merge_adapter", "model.trust_remote_code",
    "data.cache_dir", "data.long_tails", "data.preprocessing_num_workers", "data.timeout_seconds", "data.n_best_size",
    "data.max_answer_length", "data.null_answers", "data.null_score_diff_threshold", "data.quality_model",
}  # fmt: skip
_BATCH_KEYS = "training.batch_size", "training.gradient_accumulation_steps"
_EXAMPLES_PER_STEP = " x ".join(_BATCH_KEYS)
_FIXED = {
    "task", "training.few_shot", "training.preference.loss", "training.grpo.group_size", "training.seed",
    "training.window_warmup_ratio", _EXAMPLES_PER_STEP,
}  # fmt: skip


def identity(config: Config) -> Values:
    """Returns `fixed`, the values that determine model and data order, and `free`, the keys that may change."""
    flat = _flat(acting_values(config))
    fixed = {key: value for key, value in flat.items() if _is_fixed(key)}
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
    flat = _flat(values)
    if missing := next((key for key in (*fixed, *free) if key not in flat and key != _EXAMPLES_PER_STEP), None):
        return f"it is incomplete, because {missing} is missing"
    for key, value in fixed.items():
        if not _same(flat.get(key), value):
            return f"{key} is {flat.get(key)}, but the run was trained with {value}"
    return None


def _is_fixed(key: str) -> bool:
    return key in _FIXED or (key.startswith(("model.", "data.")) and key not in _CHANGEABLE)


def _flat(values: Values) -> Values:
    """Flattens values to `section.key`, and adds the number of examples per step."""
    flat = {f"training.{key}" if key in TOP_LEVEL_KEYS else key: value for key, value in flatten(values).items()}
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

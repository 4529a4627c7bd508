"""Checks that a configuration is the one that a run was trained with.

`identity` is recorded in every snapshot and in the mark of a run's folder. A config.yaml that lacks one of its keys was
cut off; one that has another value for a key that decides the model or the order of the data is another run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sansgpu.config.errors import ConfigError
from sansgpu.config.load import acting_values
from sansgpu.config.schema import Config

Values = dict[str, Any]

# Keys of the sections model and data that change neither the model nor which data a step sees. A base model may be
# moved: its weights have a fingerprint of their own in every snapshot.
_FREE = {
    "model.name_or_path", "model.gradient_checkpointing", "model.merge_adapter", "model.trust_remote_code",
    "data.cache_dir", "data.long_tails", "data.preprocessing_num_workers", "data.n_best_size", "data.max_answer_length",
    "data.null_answers", "data.null_score_diff_threshold",
}  # fmt: skip
_BATCH_KEYS = "training.batch_size", "training.gradient_accumulation_steps"
_BATCH = " x ".join(_BATCH_KEYS)
_FIXED = {"task", "training.seed", "training.window_warmup_ratio", _BATCH}
_AT_THE_TOP = "device", "force_cpu"  # may stand there or in the section training


def identity(config: Config) -> Values:
    """`fixed`: keys with the values that decide model and data order; `free`: the other keys, which may change."""
    flat = _flat(acting_values(config))
    fixed = {key: value for key, value in flat.items() if _is_fixed(key)}
    return {"fixed": fixed, "free": [key for key in flat if key not in fixed]}


def require_identity(file: Path, values: Values, recorded: Sequence[Values]) -> None:
    """Raises ConfigError if the `values` of a run's configuration `file` fit none of the identities `recorded`."""
    found = [_difference(one, values) for one in recorded]
    if found and all(found):
        raise ConfigError(
            f"{file} is not the configuration of its run: {found[0]}; restore the file, or resume with the "
            "configuration that the run was started with, and --set for changes."
        )


def _difference(recorded: Values, values: Values) -> str | None:
    """A clause that names the first key that does not fit; None if all do."""
    fixed, free = recorded.get("fixed"), recorded.get("free")
    if not isinstance(fixed, dict) or not isinstance(free, list) or not all(isinstance(key, str) for key in free):
        return None  # not as `identity` gives it, so that nothing is known
    flat = _flat(values)
    if missing := next((key for key in (*fixed, *free) if key not in flat and key != _BATCH), None):
        return f"it has no {missing}, so a part of the file is missing"
    for key, value in fixed.items():
        if not _same(flat.get(key), value):
            return f"{key} is {flat.get(key)}, but the run was trained with {value}"
    return None


def _is_fixed(key: str) -> bool:
    return key in _FIXED or (key.startswith(("model.", "data.")) and key not in _FREE)


def _flat(values: Values) -> Values:
    """Values by `section.key`, and the examples of a step."""
    flat: Values = {}
    for name, section in values.items():
        if isinstance(section, dict):
            flat |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            flat[f"training.{name}" if name in _AT_THE_TOP else name] = section
    size, accumulated = (flat.get(key) for key in _BATCH_KEYS)
    if isinstance(accumulated, int):
        flat[_BATCH] = size * accumulated if isinstance(size, int) else accumulated
    return flat


def _same(one: object, other: object) -> bool:
    """Returns True if two values mean the same: YAML reads 1e-3 as text, not as a number."""
    if one == other:
        return True
    try:
        return not isinstance(one, bool) and float(one) == float(other)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False

"""Translates the keys of other trainers (transformers' Trainer and its examples, oxidizr) to those of sansgpu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sansgpu.config.errors import ConfigError
from sansgpu.config.wording import truncate

MAX_NOTE_CHARACTERS = 1000
# Counts the examples of one process, whereas training.batch_size counts those of all processes.
PER_DEVICE = "training.per_device_train_batch_size"
_SECTIONS = {"trainer": "training"}
# sansgpu's keys by section and by the other trainer's key, unless both are equal.
KEYS = {
    "model": {
        "hidden_size": "d_model",
        "num_layers": "n_layers",
        "num_hidden_layers": "n_layers",
        "num_heads": "n_heads",
        "num_attention_heads": "n_heads",
        "kv_heads": "n_kv_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_ff",
        "max_position_embeddings": "max_seq_len",
        "tie_word_embeddings": "tie_embeddings",
        "model_name_or_path": "name_or_path",
        "position": "position_embedding",  # its name before sansgpu 0.3
    },
    "training": {
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "bf16": "precision",
        "gradient_accumulation": "gradient_accumulation_steps",
        "log_interval": "logging_steps",
        "lr": "learning_rate",
        "lr_scheduler_type": "lr_scheduler",
        "max_checkpoints": "keep_last",
        "num_train_epochs": "num_epochs",
        "per_device_train_batch_size": "batch_size",
        "save_interval": "save_steps",
        "save_total_limit": "keep_last",
        "target_device": "device",
        "use_cpu": "force_cpu",
    },
    "data": {
        "dataset_config_name": "dataset_config",
        "max_seq_length": "max_length",
        "train_file": "dataset_name",
        "validation_file": "validation_name",
    },
}
# Values that are written differently: (other trainer's key, its value) -> sansgpu's value.
_VALUES = {("bf16", True): "bf16", ("bf16", False): "fp32", ("target_device", "gpu"): "cuda"}


def own_name(key: str, value: Any) -> tuple[str, Any]:
    """Translates a dotted key and its value to those of sansgpu."""
    section, dot, name = key.partition(".")
    ours = _SECTIONS.get(section, section)
    if isinstance(value, (str, bool)):
        value = _VALUES.get((name, value), value)
    if section == "trainer" and name == "max_steps" and value == 0:
        value = None  # oxidizr: unlimited
    return f"{ours}{dot}{KEYS.get(ours, {}).get(name, name)}", value


def with_own_names(values: dict[str, Any], where: str = "the configuration") -> tuple[dict[str, Any], list[str]]:
    """Translates all keys of `values`. Also returns the replacements, e.g. `training.lr as learning_rate`.

    Raises ConfigError naming `where` if two names of the same key are given.
    """
    own: dict[str, Any] = {}
    replaced = []
    for section, inner in values.items():
        ours = _SECTIONS.get(section, section)
        if ours in own:
            raise ConfigError(
                f"{where}: trainer and training are two names of the same section; merge them into training."
            )
        replaced += [f"{section} as {ours}"] if section != ours else []
        own[ours] = inner
        if isinstance(inner, dict):
            own[ours] = section_with_own_names(section, inner, where)
            replaced += [f"{ours}.{key} as {name}" for key, name in zip(inner, own[ours], strict=True) if name != key]
    return own, replaced


def section_with_own_names(section: str, values: Mapping[str, Any], where: str = "the configuration") -> dict[str, Any]:
    """Translates the keys of one section. Raises ConfigError if two names of the same key are given."""
    pairs = {key: own_name(f"{section}.{key}", value) for key, value in values.items()}
    _require_one_name({key: name for key, (name, _) in pairs.items()}, _SECTIONS.get(section, section), where)
    return {name.partition(".")[2]: value for name, value in pairs.values()}


def _require_one_name(names: dict[str, str], section: str, where: str) -> None:
    for name in names.values():
        if len(same := [f"{section}.{key}" for key, other in names.items() if other == name]) > 1:
            raise ConfigError(f"{where}: {' and '.join(same)} are names of the same key; keep only {name}.")


def require_batch_size(training: Any, names: Sequence[str], processes: int) -> None:
    """Raises ConfigError if the batch size was given per device, under one of `names`, and there are several processes.

    `training` is the resulting section.
    """
    is_per_device = any(name.partition(" ")[0] == PER_DEVICE for name in names)
    if not is_per_device or processes == 1 or training.batch_size == "auto":
        return
    size, accumulated = training.batch_size, training.gradient_accumulation_steps
    raise ConfigError(
        f"{PER_DEVICE.partition('.')[2]} {size} would count for each of the {processes} processes, but here batch_size "
        f"x gradient_accumulation_steps is the batch of all processes together; for the same {size} x {accumulated} "
        f"examples in each process, set training.batch_size={size} and training.gradient_accumulation_steps="
        f"{accumulated * processes}."
    )


def note_of(replaced: list[str]) -> list[str]:
    """Returns a list with a note for the user about replaced names; it is empty if there are none."""
    return (
        [f"keys of other trainers were converted: {truncate(', '.join(replaced), MAX_NOTE_CHARACTERS)}."]
        if replaced
        else []
    )

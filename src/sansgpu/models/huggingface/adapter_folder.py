"""Folders that hold an adapter without its base model, as peft and `final/` of a run on a quantized base."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.config.paths import local_path
from sansgpu.config.wording import shown
from sansgpu.files.reading import read_object

ADAPTER_CONFIG = "adapter_config.json"
_PRECISIONS = get_args(ModelConfig.model_fields["base_precision"].annotation)


def is_adapter_folder(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def base_of(model: ModelConfig) -> ModelConfig | None:
    """Returns the settings of the base model of a folder with only an adapter, or None for another model.

    Raises ConfigError if the folder does not name its base model, or if that does not exist.
    """
    folder = local_path(str(model.name_or_path))
    if not is_adapter_folder(folder):
        return None
    settings = read_object(folder / ADAPTER_CONFIG)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or name in ("", "None") or not isinstance(revision, str | None):
        raise _without_base(folder, f"base_model_name_or_path is {shown(name)}")
    path = local_path(name)
    if (path.is_absolute() or name.startswith((".", "~"))) and not path.exists():
        raise _without_base(folder, f"its base model {name} does not exist")
    if is_adapter_folder(path):
        raise _without_base(folder, f"its base model {name} is an adapter, too")
    precision = how_trained(settings).get("base_precision")
    found = {"adapter": "lora", "name_or_path": name, "revision": revision}
    found["base_precision"] = precision if precision in _PRECISIONS else "auto"
    return model.model_copy(update=found)


def _without_base(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{folder} holds only an adapter, and {problem}; set base_model_name_or_path in {folder / ADAPTER_CONFIG} to "
        "the model that it was trained on."
    )


def how_trained(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what an adapter_config.json says about the base model in training."""
    mapping = settings.get("auto_mapping")
    return mapping if isinstance(mapping, dict) else {}


def add_base(settings: dict[str, Any], model: ModelConfig) -> None:
    """Adds the base model and how it was quantized to the settings that peft writes.

    peft ignores further keys of `auto_mapping`, and warns about further keys elsewhere.
    """
    settings["base_model_name_or_path"], settings["revision"] = model.name_or_path, model.revision
    settings["auto_mapping"] = {**how_trained(settings), "base_precision": model.base_precision}

"""Writes model folders, validates those from elsewhere, and finds the base model of a folder with only an adapter.

A folder is validated before a library reads it, because a bad one could make the library hang or read files elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, get_args

from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import local_path
from sansgpu.config.wording import counted, shown
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import OutputFolder
from sansgpu.files.reading import read_json, read_object, require_regular_file
from sansgpu.machine.hub import hub_folder
from sansgpu.models.formats.safetensors_file import require_short_header

GRAPH_MODEL_TYPE = "sansgpu-graph"  # in the config.json of graph encoders, which transformers cannot load
ADAPTER_CONFIG = "adapter_config.json"
DECODER_CLASSES = ("ForCausalLM", "LMHeadModel")  # ends of the names of transformers' classes of decoders
_ADAPTER_FILES = "*.json", "adapter_model.safetensors", "*.jinja", "*.txt", "*.model"
MAX_PARTS = 10_000  # maximum layers, experts or heads in a config.json, because each may become a module
ALLOWED_LAYERS = 128  # up to this depth a model is built even if weights are missing: torch then reports their names
MAX_WIDTH = 1 << 24  # maximum size of a vocabulary or a hidden layer in a config.json
_WIDTHS = re.compile(r"(size|dim)$|^(n_embd|n_inner|d_\w+)$")
_PARTS = re.compile(r"^(n|num)_.*(layers?|experts?|blocks?|heads?)$|_layers$")
_MOST_GGUF_FILES = 1000
_GGUF_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PRECISIONS = get_args(ModelConfig.model_fields["base_precision"].annotation)


def write_folder_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary folder, and then replaces `folder` with it.

    Raises ConfigError if `folder` holds files that sansgpu did not write, and SansGPUError if writing fails.
    """
    try:
        with write_failures_as(SansGPUError, folder), OutputFolder(folder, "model", "--output").replace() as new:
            write(new)
    except SafetensorError as error:
        raise SansGPUError(f"{folder} cannot be written ({error}); free some space or choose another folder.") from None


class SavedTokenizer(Protocol):
    """The interface of a tokenizer that can be written to a folder."""

    def save(self, folder: Path) -> None: ...


def export_module(model: nn.Module, config: ModelConfig, tokenizer: SavedTokenizer, folder: Path) -> None:
    """Writes model.safetensors, config.json and the tokenizer for a model that only sansgpu can load."""
    settings = {"architectures": [type(model).__name__], **config.model_dump(mode="json", exclude_defaults=True)}

    def write(partial: Path) -> None:
        save_model(model, str(partial / "model.safetensors"), metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        tokenizer.save(partial)

    write_folder_atomically(folder, write)


def validate_model_folder(folder: Path) -> None:
    """Raises ConfigError if a library should not read a model folder.

    The folder must not contain a pipe or a device, a safetensors file with a very long header, an index that names
    files outside the folder, or a config with impossible sizes.
    """
    for path in sorted(folder.iterdir()):
        require_regular_file(path)
        if path.suffix == ".safetensors":
            require_short_header(path)
        if path.name.endswith(".index.json"):
            _check_index(path)
    for name in ("config.json", ADAPTER_CONFIG):
        if (folder / name).exists():
            require_possible_sizes(read_json(folder / name), folder / name)


def folder_settings(folder: Path) -> dict[str, Any]:
    """Validates a model folder and returns its config.json, or {} if there is none. Raises ConfigError."""
    if not (folder / "config.json").exists():
        return {}
    validate_model_folder(folder)
    return read_object(folder / "config.json")


def is_graph_folder(folder: Path) -> bool:
    """Returns True if the folder holds a graph encoder that only sansgpu can load."""
    return folder_settings(folder).get("model_type") == GRAPH_MODEL_TYPE


def has_architecture(folder: Path, ending: str) -> bool:
    """Returns True if the class of the model, or of an adapter's base model, ends with e.g. "ForCausalLM"."""
    names: Any = folder_settings(folder).get("architectures")
    if is_adapter_folder(folder):
        names = [auto_mapping_of(read_object(folder / ADAPTER_CONFIG)).get("base_model_class")]
    return isinstance(names, list) and any(str(name).endswith(ending) for name in names)


def require_possible_sizes(settings: Any, source: Path) -> None:
    """Raises ConfigError if a config has implausibly large sizes, or key-value heads that do not divide the heads."""
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{source} contains a value of type {type(settings).__name__} instead of keys and values; download the "
            "model again."
        )
    for key, value in settings.items():
        if isinstance(value, dict):
            require_possible_sizes(value, source)
        limit = MAX_PARTS if _PARTS.search(key) else MAX_WIDTH if _WIDTHS.search(key) else None
        is_number = isinstance(value, (int, float))
        if limit is not None and is_number and not -limit <= value <= limit and not _is_default(settings, key):
            raise ConfigError(
                f"{source}: {key} is {shown(value)}, but models have at most {limit:,}; correct it, or download the "
                "model again."
            )
    heads, kv_heads = (settings.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        raise ConfigError(
            f"{source}: num_key_value_heads is {kv_heads}, which does not divide num_attention_heads, {heads}; correct "
            "one of the two."
        )


def _is_default(settings: dict[str, Any], key: str) -> bool:
    """Returns True if the value is transformers' default, such as Doge's 16,384 experts, which it does not use."""
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(str(settings["model_type"]))
    except (KeyError, ValueError):
        return False
    return bool(getattr(default, key, None) == settings[key])


def require_layers(layers: int, weights: int, source: Path | str) -> None:
    """Raises ConfigError if a config asks for more layers than there are weights, before they are all built."""
    if layers > max(weights, ALLOWED_LAYERS):
        raise ConfigError(
            f"{source}: the weights do not match the model's config ({counted(layers, 'layer')}, but "
            f"{counted(weights, 'weight')}); download or export it again."
        )


def _check_index(path: Path) -> None:
    files = read_object(path).get("weight_map", {})
    names = list(files.values()) if isinstance(files, dict) else [files]
    for name in dict.fromkeys(map(str, names)):
        if name != Path(name).name or not (path.parent / name).is_file():
            raise ConfigError(
                f"{path} names the weights file {name[:200]!r}, which is not in its folder; download the model again."
            )


def is_adapter_folder(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def retrieval_adapters(folder: Path) -> tuple[Path, Path] | None:
    """Returns the adapters for queries and for passages inside a model's folder, as of Jina Embeddings v3, if any."""
    for separator in "._":
        query, passage = (folder / f"retrieval{separator}{kind}" for kind in ("query", "passage"))
        if is_adapter_folder(query) and is_adapter_folder(passage):
            return query, passage
    return None


def adapter_folder(model: ModelConfig) -> Path | None:
    """Returns the folder of a model that is only an adapter, downloaded if it is on the Hub; None for other models."""
    name = str(model.name_or_path)
    folder = local_path(name)
    if model.name_or_path is not None and not folder.exists() and not name.endswith(".gguf"):
        return hub_folder(name, model.revision, ADAPTER_CONFIG, "config.json", _ADAPTER_FILES)
    return folder if is_adapter_folder(folder) else None


def base_of(model: ModelConfig) -> ModelConfig | None:
    """Returns the config of the base model if the model is only an adapter, or else None.

    Raises ConfigError if the adapter's folder does not name its base model, or if the base model does not exist.
    """
    folder = adapter_folder(model)
    if folder is None:
        return None
    settings = read_object(folder / ADAPTER_CONFIG)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or name in ("", "None") or not isinstance(revision, str | None):
        raise _without_base(folder, f"base_model_name_or_path is {shown(name)}")
    path = local_path(name)
    if (path.is_absolute() or name.startswith((".", "~"))) and not path.exists():
        raise _without_base(folder, f"its base model {name} does not exist")
    if is_adapter_folder(path):
        raise _without_base(folder, f"its base model {name} is also an adapter")
    precision = auto_mapping_of(settings).get("base_precision")
    found = {"adapter": "lora", "name_or_path": name, "revision": revision}
    found["base_precision"] = precision if precision in _PRECISIONS else "auto"
    return model.model_copy(update=found)


def frozen_base(model: ModelConfig) -> ModelConfig:
    """Returns the config of the model under an adapter that is trained further, or else `model` itself.

    The base is quantized as it was when the adapter was trained, unless the config says otherwise. Raises ConfigError
    if there is no such adapter.
    """
    if model.adapter != "continue":
        return model
    base = base_of(model)
    if base is None:
        raise ConfigError(
            f"model.adapter is continue, but {model.name_or_path} has no {ADAPTER_CONFIG}; set model.name_or_path to "
            "an adapter, or model.adapter to lora for a new one."
        )
    return base if model.base_precision == "auto" else base.model_copy(update={"base_precision": model.base_precision})


def _without_base(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{folder} contains only an adapter, and {problem}; set base_model_name_or_path in {folder / ADAPTER_CONFIG} "
        "to the model that it was trained on."
    )


def auto_mapping_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the `auto_mapping` of an adapter_config.json: class, precision and labels of the adapted model."""
    mapping = settings.get("auto_mapping")
    return mapping if isinstance(mapping, dict) else {}


def add_base(settings: dict[str, Any], model: ModelConfig) -> None:
    """Adds the base model's name, revision and precision to the settings in an adapter_config.json, in place.

    The precision goes into `auto_mapping`, because peft ignores unknown keys there and warns about them elsewhere.
    """
    settings["base_model_name_or_path"], settings["revision"] = model.name_or_path, model.revision
    settings["auto_mapping"] = {**auto_mapping_of(settings), "base_precision": model.base_precision}


def gguf_parts(path: Path) -> list[Path]:
    """Returns the paths of all parts of a model in several GGUF files if `path` is named like one, or else only it."""
    name = _GGUF_PART.fullmatch(path.name)
    if name is None or not 1 <= int(name["number"]) <= int(name["count"]) <= _MOST_GGUF_FILES:
        return [path]
    count = int(name["count"])
    return [path.with_name(f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]

"""Writes model folders, and checks foreign ones before a library reads them: bad ones could make it hang, or read files
elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from sansgpu.config import ConfigError, ModelConfig, SansGPUError
from sansgpu.config.wording import counted
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import replace_folder
from sansgpu.files.reading import read_json, read_object, require_regular_file


def write_folder_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a temporary folder, then replaces `folder` with it.

    Raises ConfigError if `folder` holds files that sansgpu did not write, and SansGPUError if writing fails.
    """
    try:
        with write_failures_as(SansGPUError, folder), replace_folder(folder, "model") as new:
            write(new)
    except SafetensorError as error:
        raise SansGPUError(f"{folder} cannot be written: {error}.") from None


class SavedTokenizer(Protocol):
    """A tokenizer that can be written to a folder."""

    def save(self, folder: Path) -> None: ...


def export_module(model: nn.Module, config: ModelConfig, tokenizer: SavedTokenizer, folder: Path) -> None:
    """Writes model.safetensors, config.json and the tokenizer. The module's own class reads them."""
    settings = {"architectures": [type(model).__name__], **config.model_dump(mode="json", exclude_defaults=True)}

    def write(partial: Path) -> None:
        save_model(model, str(partial / "model.safetensors"), metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        tokenizer.save(partial)

    write_folder_atomically(folder, write)


MAX_PARTS = 10_000  # layers, experts or heads in a config.json; each costs a loop iteration or a module
MAX_HEADER_BYTES = 16 << 20  # about 150,000 tensors, read in seconds; safetensors itself allows 100 MB
ALLOWED_LAYERS = 128  # models of up to this depth are built in any case, because torch then names the missing weights
MAX_WIDTH = 1 << 24  # maximum size of a vocabulary or a layer
_WIDTHS = re.compile(r"(size|dim)$|^(n_embd|n_inner|d_\w+)$")
_PARTS = re.compile(r"^(n|num)_.*(layers?|experts?|blocks?|heads?)$|_layers$")


def validate_model_folder(folder: Path) -> None:
    """Raises ConfigError if a model folder holds a pipe or device, or settings with impossible sizes.

    An index of weights may only name files in its own folder.
    """
    for path in sorted(folder.iterdir()):
        require_regular_file(path)
        if path.suffix == ".safetensors":
            require_short_header(path)
        if path.name.endswith(".index.json"):
            _check_index(path)
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).exists():
            require_possible_sizes(read_json(folder / name), folder / name)


def folder_settings(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a model folder, or no settings if there is none. Raises ConfigError."""
    if not (folder / "config.json").exists():
        return {}
    validate_model_folder(folder)
    return read_object(folder / "config.json")


def has_architecture(folder: Path, ending: str) -> bool:
    """Returns True if the folder holds a transformers model whose class name has this ending."""
    names = folder_settings(folder).get("architectures")
    return isinstance(names, list) and any(str(name).endswith(ending) for name in names)


def require_possible_sizes(settings: Any, source: Path) -> None:
    """Raises ConfigError if settings have sizes that no model has, or key-value heads that do not divide the heads."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{source} holds a {type(settings).__name__}, not keys and values.")
    for key, value in settings.items():
        if isinstance(value, dict):
            require_possible_sizes(value, source)
        limit = MAX_PARTS if _PARTS.search(key) else MAX_WIDTH if _WIDTHS.search(key) else None
        if limit is not None and isinstance(value, (int, float)) and not -limit <= value <= limit:
            raise ConfigError(f"{source}: {key} is larger than {limit:,}, which no model has.")
    heads, kv_heads = (settings.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        raise ConfigError(
            f"{source}: num_key_value_heads is {kv_heads}, which does not divide {heads} attention heads."
        )


def require_short_header(path: Path) -> None:
    """Raises ConfigError if the header of a safetensors file is too long."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ConfigError(f"{path} holds no weights that can be read: its header has {length:,} bytes.")


def require_layers(layers: int, weights: int, source: Path | str) -> None:
    """Raises ConfigError if a model has more layers than weights, before building them all."""
    if layers > max(weights, ALLOWED_LAYERS):
        raise ConfigError(
            f"{source}: the weights do not fit its settings: {counted(layers, 'layer')}, but "
            f"{counted(weights, 'weight')}."
        )


def _check_index(path: Path) -> None:
    files = read_object(path).get("weight_map", {})
    names = list(files.values()) if isinstance(files, dict) else [files]
    for name in dict.fromkeys(map(str, names)):
        if name != Path(name).name or not (path.parent / name).is_file():
            raise ConfigError(f"{path} names the weights {name[:200]!r}, which is not a file in its folder.")


MODEL_TYPE = "sansgpu-graph"  # model_type in config.json of our own layout

"""Finds the files of a pretrained model: a folder, a GGUF file or a name on the Hub."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sansgpu.config import ConfigError, RunPaths
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import local_path
from sansgpu.files.reading import read_object, require_regular_file
from sansgpu.machine.hub import failure, quiet_hub
from sansgpu.machine.untrusted.sandbox import is_panic
from sansgpu.models.formats.folders import (
    ADAPTER_CONFIG,
    adapter_folder,
    auto_mapping_of,
    base_of,
    frozen_base,
    is_graph_folder,
    validate_model_folder,
)
from sansgpu.models.formats.gguf_source import is_gguf, open_gguf
from sansgpu.models.formats.weights import (
    BasePrecision,
    StoredTensor,
    format_of,
    quantized_matrices,
    safetensors_weights,
)

if TYPE_CHECKING:  # transformers takes seconds to import, so functions import it when they need it
    from transformers import PreTrainedConfig, PreTrainedModel

    from sansgpu.models.formats.gguf_file import GGUFFile


def is_text_part(loaded: PreTrainedModel, model: ModelConfig) -> bool:
    """Returns True if a model was loaded without the parts for images or sound that its folder has."""
    config = pretrained_config(model)
    text = config.get_text_config()
    return text is not config and loaded.config.model_type == text.model_type


def pretrained_config(model: ModelConfig) -> PreTrainedConfig:
    """Loads the config of a model, or of an adapter's base model. Raises ConfigError if it cannot be loaded."""
    if (base := base_of(model)) is not None:
        folder = adapter_folder(model)
        assert folder is not None
        trained, config = auto_mapping_of(read_object(folder / ADAPTER_CONFIG)), pretrained_config(base)
        if isinstance(labels := trained.get("labels"), list):
            set_labels(config, [str(label) for label in labels], trained.get("problem_type"))
        return config
    if (file := gguf_file_of(model)) is not None:
        return _config_of(file)
    from transformers import AutoConfig

    name, options = source_of(model)
    if Path(name).is_dir() and is_graph_folder(Path(name)):
        raise ConfigError(
            f"{name} is a graph encoder that transformers cannot load; train a plain BERT instead, with "
            "model.leaves 0, model.decay none, model.position_embedding learned and model.embedding_norm true."
        )
    with library_errors(f"{name} cannot be loaded"):
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(name, **options)
    if missing := [key for key in ("vocab_size", "hidden_size") if not hasattr(loaded.get_text_config(), key)]:
        raise ConfigError(
            f"{name}: its config has no {missing[0]}, because {loaded.model_type} models do not look tokens up in one "
            "table of vectors, which sansgpu requires; choose another model."
        )
    return loaded


def set_labels(config: PreTrainedConfig, labels: Sequence[str], problem_type: Any) -> None:
    """Sets the labels of a classifier, in the order of its logits, and what kind of labels they are."""
    config.id2label = dict(enumerate(labels))  # also sets num_labels
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = problem_type


def own_labels(config: PreTrainedConfig) -> tuple[str, ...]:
    """Returns the labels of a classifier in the order of its logits; empty if they have transformers' default names."""
    names = tuple(str(name) for _, name in sorted((getattr(config, "id2label", None) or {}).items()))
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names


def model_file(model: ModelConfig, name: str) -> Path | None:
    """Returns the path of a file of a model, downloading it if needed, or None if the model does not have it."""
    if is_gguf(str(model.name_or_path)):
        return None
    from transformers.utils.hub import cached_file

    source, options = source_of(model)
    options.pop("trust_remote_code")
    with library_errors(f"{name} of {source} cannot be loaded"):
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **options)
    return Path(found) if found else None


def base_precision(model: ModelConfig, frozen: bool = False) -> BasePrecision | None:
    """Returns the precision in which the frozen base of an adapter is kept in memory; None: as transformers loads it.

    With `frozen`, this applies to a model without an adapter, too. Otherwise, such a model is trained, and the result
    is None.
    """
    model = frozen_base(model)
    is_trained = model.adapter == "none" and not frozen
    if is_trained or (model.base_precision == "auto" and not is_gguf(str(model.name_or_path))):
        return None
    if model.base_precision != "auto":
        return model.base_precision
    file = gguf_file_of(model)
    assert file is not None
    return "file" if file.is_quantized else None


def is_base_quantized(model: ModelConfig) -> bool:
    return base_precision(model) not in (None, "bf16")


def file_formats(model: ModelConfig) -> list[str]:
    """Returns the names of the formats in which the quantized matrices of a GGUF file are kept in memory."""
    matrices = quantized_matrices(stored_weights(model))
    formats = (format_of("file", matrix.shape[-1], matrix.quantized_as) for matrix in matrices)
    return sorted({chosen.name for chosen in formats if chosen is not None})


def requantized_formats(model: ModelConfig) -> list[str]:
    """Returns the names of a GGUF file's quantizations for which there is no kernel, so that they are requantized."""
    if base_precision(model) != "file":
        return []
    return sorted({str(t.quantized_as) for t in quantized_matrices(stored_weights(model)) if t.blocks is None})


def stored_weights(model: ModelConfig) -> dict[str, StoredTensor]:
    """Returns the tensors of a model, which are read on demand. Raises ConfigError if it has no safetensors files."""
    model = frozen_base(model)
    if (file := gguf_file_of(model)) is not None:
        return file.stored_weights()
    if (index := model_file(model, "model.safetensors.index.json")) is not None:
        names = dict.fromkeys(read_object(index).get("weight_map", {}).values())
        found = [model_file(model, str(name)) for name in names]
    else:
        found = [model_file(model, "model.safetensors")]
    files = [path for path in found if path is not None]
    if len(files) < len(found) or not files:
        raise ConfigError(
            f"{model.name_or_path} has no model.safetensors, which model.base_precision requires; set "
            "model.base_precision=auto, or save the model with transformers."
        )
    return safetensors_weights(files)


def gguf_file_of(model: ModelConfig) -> GGUFFile | None:
    name = str(model.name_or_path)
    return open_gguf(local_path(name)) if is_gguf(name) else None


def _config_of(file: GGUFFile) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    _silence_transformers()
    with library_errors(f"{file.path} is not a valid model"):
        kind: type[PreTrainedConfig] = CONFIG_MAPPING[file.settings["model_type"]]
        computed = {key for key, value in vars(kind).items() if isinstance(value, property) and value.fset is None}
        return kind(**{key: value for key, value in file.settings.items() if key not in {"model_type", *computed}})


def _silence_transformers() -> None:
    from transformers.utils import logging

    quiet_hub()
    warnings.filterwarnings("ignore", module=r"torch\._weights_only_unpickler")  # about pickles that it refuses
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def source_of(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Returns (name or path, keyword arguments) for from_pretrained. Validates a folder.

    Raises ConfigError if the path does not exist or is not a model folder.
    """
    name = str(model.name_or_path)
    path = adapter_folder(model) or local_path(name)
    _silence_transformers()
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise ConfigError(
            f"model.name_or_path {name} does not exist; set it to a folder or the name of a model on the Hub."
        )
    if path.is_dir() and not any((path / known).is_file() for known in ("config.json", ADAPTER_CONFIG)):
        final = RunPaths(path).final
        advice = f"use {final}" if final.is_dir() else "pass the folder that contains it"
        raise ConfigError(f"{name} is not a model folder: it has no config.json; {advice}.")
    if path.is_dir():
        validate_model_folder(path)
        _require_no_import(path / ADAPTER_CONFIG)
    else:
        require_regular_file(path)
    options = {"revision": model.revision} if model.revision else {}
    return str(path) if path.is_dir() else name, {**options, "trust_remote_code": model.trust_remote_code}


def _require_no_import(adapter: Path) -> None:
    """Raises ConfigError if an adapter's settings would make peft import a module that they name."""
    if not adapter.is_file():
        return
    with library_errors(f"{adapter} cannot be read"):
        settings = json.loads(adapter.read_text(encoding="utf-8"))
    if isinstance(settings, dict) and settings.get("megatron_config"):
        raise ConfigError(f"{adapter} would import a Python module (megatron_core); set megatron_config to null.")


class library_errors:  # noqa: N801  used like a function
    """Context that converts errors of libraries to ConfigError with `prefix` and the first line of their message."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, ConfigError):
            return
        if isinstance(error, Exception) or is_panic(error):
            if "trust_remote_code" in str(error):
                raise ConfigError(
                    f"{self._prefix}: it contains custom Python code; review that code, then pass --trust-remote-code."
                ) from None
            if "Unrecognized configuration class" in str(error):  # transformers' message lists hundreds of classes
                raise ConfigError(
                    f"{self._prefix}: transformers has no such model for its architecture; "
                    "choose another model or task."
                ) from None
            if "weights_only" in str(error):  # torch's message suggests running the code in the file
                raise ConfigError(
                    f"{self._prefix}: its weights are a pickle file, which can run code; use the model in safetensors "
                    "format."
                ) from None
            if "ignore_mismatched_sizes" in str(error):  # transformers' message is about an option of its own
                raise ConfigError(
                    f"{self._prefix}: its weights do not have the shapes that its configuration describes; download or "
                    "export it again."
                ) from None
            raise ConfigError(
                f"{self._prefix} ({failure(error)}); download or export it again, or choose another model."
            ) from None

"""Writes LoRA adapters as GGUF files, which llama.cpp adds to a base model (`--lora`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import Keys

from sansgpu.config import ConfigError
from sansgpu.files.reading import read_object
from sansgpu.models import families
from sansgpu.models.family import block_pattern
from sansgpu.models.formats.folders import ADAPTER_CONFIG
from sansgpu.models.formats.gguf_file import ModelDescription, describe, write_file
from sansgpu.models.formats.gguf_layout import has_own_layout, permuted
from sansgpu.models.formats.gguf_metadata import language_model_of, require_expressible
from sansgpu.models.formats.gguf_names import gguf_architecture, gguf_modules
from sansgpu.models.formats.gguf_reader import TYPES, GGUFType
from sansgpu.models.formats.safetensors_file import load_weights
from sansgpu.models.formats.weights import StoredTensor, as_stored

ADAPTER_TYPES: tuple[GGUFType, ...] = ("f32", "f16", "bf16")
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # peft's, before transformers' names
_SUFFIXES = {".lora_A.weight": "lora_a", ".lora_B.weight": "lora_b"}


def write_gguf_adapter(
    path: Path, folder: Path, settings: Mapping[str, Any], gguf_type: GGUFType, description: ModelDescription
) -> None:
    """Writes the adapter in a peft folder to a file. `settings` is the content of the base model's config.json.

    Raises ConfigError if llama.cpp does not support the base model, or if the adapter has more than LoRA matrices.
    """
    matrices = {name.removeprefix(_PREFIX): matrix.float() for name, matrix in load_weights(folder / WEIGHTS).items()}
    settings, weights = language_model_of(settings, matrices)
    settings = families.with_default_settings(settings)
    require_expressible(settings)
    config, modules = read_object(folder / ADAPTER_CONFIG), gguf_modules(settings)
    shared_alpha: float | None = None
    tensors: dict[str, StoredTensor] = {}
    for name, matrix in weights.items():
        module, suffix = _parts(name, settings, modules)
        if suffix == ".lora_B.weight":
            alpha = _alpha(module, matrix.shape[1], config)
            shared_alpha = shared_alpha or alpha
            # llama.cpp multiplies by alpha / rank, with one alpha for all layers.
            matrix = permuted(f"{module}.weight", matrix, settings) * (alpha / shared_alpha)
        tensors[f"{modules[module]}.weight.{_SUFFIXES[suffix]}"] = as_stored(matrix.contiguous())

    def write_metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, shared_alpha or 0.0)
        describe(writer, description, gguf_type)

    encodings = dict.fromkeys(tensors, TYPES[gguf_type][0])
    write_file(path, gguf_architecture(settings), write_metadata, tensors, encodings)


def _parts(name: str, settings: Mapping[str, Any], modules: Mapping[str, str]) -> tuple[str, str]:
    """Divides a tensor's name into its module and its suffix. Raises ConfigError if llama.cpp cannot use it."""
    suffix = next((ending for ending in _SUFFIXES if name.endswith(ending)), "")
    module = name.removesuffix(suffix)
    is_tied_head = module == "lm_head" and settings.get("tie_word_embeddings")
    is_divided = block_pattern(module)[0] in families.get(settings["model_type"]).gguf_divided(settings)
    is_other = is_divided or module not in modules or has_own_layout(f"{module}.weight", settings)
    if not suffix or is_other or is_tied_head:
        raise ConfigError(f"llama.cpp's adapters cannot contain {name}; remove --no-merge to export the merged model.")
    return module, suffix


def _alpha(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Returns the alpha for which alpha / rank is peft's scaling of the layer."""
    from peft.utils.other import get_pattern_key  # takes a second to import

    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    alpha = float(patterns.get(get_pattern_key(list(patterns), module), config["lora_alpha"]))
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha

"""Names of modules and weights in transformers and in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import gguf

from sansgpu.models import families
from sansgpu.models.family import Family, Settings, block_pattern


def gguf_architecture(settings: Settings) -> str:
    """Returns llama.cpp's name of the architecture."""
    return families.get(settings["model_type"]).llama_cpp_name


def layer_count(settings: Settings) -> int:
    return int(settings[families.get(settings["model_type"]).sizes["n_layers"][0]])


def gguf_modules(settings: Settings) -> dict[str, str]:
    """Maps Hugging Face's module names to llama.cpp's."""
    family, layers = families.get(settings["model_type"]), layer_count(settings)
    architecture = gguf_architecture(settings)
    # The package gguf is older than some architectures; their modules have Llama's names.
    archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    arch = archs.get(architecture, gguf.MODEL_ARCH.LLAMA)
    table = gguf.get_tensor_name_map(arch, layers)
    found = {module: name for module in _module_names(family, layers) if (name := table.get_name(module))}
    more = {**family.gguf_modules, **family.gguf_more_modules(settings)}
    return found | {
        hf_name.format(layer): name.format(layer) for hf_name, name in more.items() for layer in range(layers)
    }


def gguf_names(settings: Settings) -> Callable[[str], str | None]:
    """Returns a function from Hugging Face's name of a weight to llama.cpp's; None for unknown weights."""
    return partial(_renamed, gguf_modules(settings), families.get(settings["model_type"]).gguf_weights)


def hugging_face_names(settings: Settings) -> Callable[[str], str | None]:
    """Inverts `gguf_names`."""
    modules = {new: old for old, new in gguf_modules(settings).items()}
    weights = {new: old for old, new in families.get(settings["model_type"]).gguf_weights.items()}
    return partial(_renamed, modules, weights)


def _renamed(modules: Mapping[str, str], weights: Mapping[str, str], name: str) -> str | None:
    """Returns the new name of a weight in `weights`, or of one that belongs to a module in `modules`."""
    pattern, number = block_pattern(name)
    if pattern in weights:
        return weights[pattern].format(number)
    module, _, parameter = name.rpartition(".")
    return f"{modules[module]}.{parameter}" if module in modules else None


def _module_names(family: Family, layers: int) -> Iterator[str]:
    """Yields transformers' names of the modules with weights."""
    for pattern in family.modules.values():
        yield from (pattern.format(layer) for layer in range(layers)) if "{}" in pattern else (pattern,)

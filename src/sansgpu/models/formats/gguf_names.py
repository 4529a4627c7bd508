"""Names of modules and weights in transformers and in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

import gguf

from sansgpu.models import families
from sansgpu.models.family import Family, Settings


def gguf_architecture(settings: Settings) -> str:
    """Returns llama.cpp's name of the architecture."""
    return families.get(settings["model_type"]).llama_cpp_name


def gguf_modules(settings: Settings) -> dict[str, str]:
    """Maps Hugging Face's module names to llama.cpp's."""
    family, layers = families.get(settings["model_type"]), layer_count(settings)
    architecture = gguf_architecture(settings)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, layers)
    found = {module: name for module in _module_names(family, layers) if (name := table.get_name(module))}
    return found | {
        hf_name.format(layer): name.format(layer)
        for hf_name, name in family.gguf_modules.items()
        for layer in range(layers)
    }


def _module_names(family: Family, layers: int) -> Iterator[str]:
    """Yields transformers' names of the modules with weights."""
    for pattern in family.modules.values():
        yield from (pattern.format(layer) for layer in range(layers)) if "{}" in pattern else (pattern,)


def layer_count(settings: Settings) -> int:
    return int(settings[families.get(settings["model_type"]).sizes["n_layers"][0]])


def parameter_of_module(name: str, family: Family) -> str:
    """Returns the name of a weight with a last part that llama.cpp knows: weight or bias."""
    pairs = family.gguf_parameters.items()
    return next((name.removesuffix(own) + ending for own, ending in pairs if name.endswith(own)), name)


def own_parameter(name: str, family: Family) -> str:
    """Inverts `parameter_of_module`."""
    pairs = family.gguf_parameters.items()
    return next((name.removesuffix(ending) + own for own, ending in pairs if name.endswith(ending)), name)

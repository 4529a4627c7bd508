"""The families of models with rules of their own, one file each, which this package finds.

The name of a file is the `model_type` in config.json, with underscores for hyphens, and `FAMILY` is the `Family` in it.
Models without a file are trained by the rules that trials find.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from typing import Any

from sansgpu.models.family import Family, Settings


@cache
def _files() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def _in_file(name: str) -> Family:
    family: Family = importlib.import_module(f"{__name__}.{name}").FAMILY
    return replace(family, model_type=family.model_type or name)


def find(model_type: object) -> Family | None:
    """Returns the family with a `model_type`, or None if it has no file. Imports only that file and its imports."""
    name = str(model_type).replace("-", "_")
    family = _in_file(name) if name in _files() else None
    return family if family is not None and family.model_type == model_type else None


def get(model_type: str) -> Family:
    """Returns the family with a `model_type` that has a file."""
    family = find(model_type)
    assert family is not None, model_type
    return family


@cache
def every() -> tuple[Family, ...]:
    """Returns all families, in the order of their names."""
    return tuple(map(_in_file, _files()))


@cache
def with_gguf() -> tuple[Family, ...]:
    """Returns the families that GGUF files may have."""
    return tuple(family for family in every() if family.modules)


def with_default_settings(settings: Settings) -> dict[str, Any]:
    """Adds the family's defaults for missing keys to a config.json. Raises KeyError if a required key is missing."""
    present = {key: value for key, value in settings.items() if value is not None}
    family = find(present["model_type"])
    return present if family is None else {**family.defaults(present), **present}

"""Configurations: their sections, files and errors. Nothing here names a task or imports torch.

Users import `Config`, `ModelConfig`, `TrainingConfig` and `DataConfig` from here, which have the keys of all tasks. The
classes of the same names in the modules have only the keys that several tasks share; tasks extend them.
"""

from typing import TYPE_CHECKING, Any

import sansgpu
from sansgpu.config.errors import ConfigError, SansGPUError, UnreachableError
from sansgpu.config.find import PRESETS, same_input
from sansgpu.config.identity import identity, require_identity
from sansgpu.config.load import (
    Override,
    acting_values,
    change_config,
    flatten,
    overridden_key,
    save_config,
    setting,
)
from sansgpu.config.other_names import note_of, require_batch_size, with_own_names
from sansgpu.config.paths import (
    ABANDONED_FOLDER,
    ARITHMETIC,
    BUILT_IN_NAMES,
    NATIVE_TEMPLATE,
    PYTHON_STDLIB,
    PYTHON_STDLIB_CHAT,
    PYTHON_STDLIB_GRAPH,
    SIMPLE_TEMPLATE,
    RunPaths,
)
from sansgpu.config.section import problems
from sansgpu.config.seeds import derive_seed
from sansgpu.config.tasks import CardText, Metric, TaskSettings, import_class

if TYPE_CHECKING:
    from sansgpu.config.data import DataConfig
    from sansgpu.config.model import ModelConfig
    from sansgpu.config.schema import Config
    from sansgpu.config.training import TrainingConfig

__all__ = [
    "ABANDONED_FOLDER",
    "ARITHMETIC",
    "BUILT_IN_NAMES",
    "NATIVE_TEMPLATE",
    "PRESETS",
    "PYTHON_STDLIB",
    "PYTHON_STDLIB_CHAT",
    "PYTHON_STDLIB_GRAPH",
    "SIMPLE_TEMPLATE",
    "CardText",
    "Config",
    "ConfigError",
    "DataConfig",
    "Metric",
    "ModelConfig",
    "Override",
    "RunPaths",
    "SansGPUError",
    "TaskSettings",
    "TrainingConfig",
    "UnreachableError",
    "acting_values",
    "change_config",
    "derive_seed",
    "flatten",
    "identity",
    "import_class",
    "note_of",
    "overridden_key",
    "problems",
    "require_batch_size",
    "require_identity",
    "same_input",
    "save_config",
    "setting",
    "with_own_names",
]


def __getattr__(name: str) -> Any:
    if name not in sansgpu.CONFIGURATION:
        raise AttributeError(f"module sansgpu.config has no attribute {name}")
    return getattr(sansgpu, name)

"""The configuration schema, its files and its errors. Nothing in this package imports torch."""

from sansgpu.config.built_in import PRESETS
from sansgpu.config.by_task import (
    BUILT_IN_NAMES,
    FINE_TUNING,
    GRAPH,
    MASKED,
    PRETRAIN,
    PYTHON_STDLIB,
    PYTHON_STDLIB_CHAT,
    PYTHON_STDLIB_GRAPH,
    SIMPLE_TEMPLATE,
    VARIABLE_LENGTH,
)
from sansgpu.config.errors import ConfigError, SansGPUError, UnreachableError
from sansgpu.config.identity import identity, require_identity
from sansgpu.config.load import (
    Override,
    acting_values,
    as_config,
    change_config,
    default_values,
    flatten,
    load_config,
    overridden_key,
    problems,
    recorded_values,
    save_config,
    setting,
)
from sansgpu.config.model import MAX_LEAVES, ModelConfig
from sansgpu.config.paths import ABANDONED_FOLDER, RunPaths
from sansgpu.config.schema import Config, DataConfig
from sansgpu.config.search_space import SearchParameter, Space, load_space, measure_of, spaced_values
from sansgpu.config.seeds import derive_seed
from sansgpu.config.training import TrainingConfig

__all__ = [
    "ABANDONED_FOLDER",
    "BUILT_IN_NAMES",
    "FINE_TUNING",
    "GRAPH",
    "MASKED",
    "MAX_LEAVES",
    "PRESETS",
    "PRETRAIN",
    "PYTHON_STDLIB",
    "PYTHON_STDLIB_CHAT",
    "PYTHON_STDLIB_GRAPH",
    "SIMPLE_TEMPLATE",
    "VARIABLE_LENGTH",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "Override",
    "RunPaths",
    "SansGPUError",
    "SearchParameter",
    "Space",
    "TrainingConfig",
    "UnreachableError",
    "acting_values",
    "as_config",
    "change_config",
    "default_values",
    "derive_seed",
    "flatten",
    "identity",
    "load_config",
    "load_space",
    "measure_of",
    "overridden_key",
    "problems",
    "recorded_values",
    "require_identity",
    "save_config",
    "setting",
    "spaced_values",
]

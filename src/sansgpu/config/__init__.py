"""The configuration schema, its files and its errors. Nothing in this package imports torch."""

from sansgpu.config.by_task import (
    BUILT_IN_NAMES,
    FINE_TUNING,
    GRAPH,
    MASKED,
    PRETRAIN,
    PYTHON_STDLIB,
    PYTHON_STDLIB_CHAT,
    PYTHON_STDLIB_GRAPH,
    RAGGED,
    SIMPLE_TEMPLATE,
)
from sansgpu.config.errors import ConfigError, SansGPUError, UnreachableError
from sansgpu.config.identity import identity, require_identity
from sansgpu.config.load import (
    PRESETS,
    acting_values,
    as_config,
    change_config,
    default_values,
    load_config,
    problems,
    recorded_values,
    save_config,
)
from sansgpu.config.model import MOST_LEAVES, ModelConfig
from sansgpu.config.paths import ABANDONED, RunPaths
from sansgpu.config.schema import Config, DataConfig
from sansgpu.config.seeds import fold_seed
from sansgpu.config.space import Parameter, Space, load_space, measure_of, spread
from sansgpu.config.training import TrainingConfig

__all__ = [
    "ABANDONED",
    "BUILT_IN_NAMES",
    "FINE_TUNING",
    "GRAPH",
    "MASKED",
    "MOST_LEAVES",
    "PRESETS",
    "PRETRAIN",
    "PYTHON_STDLIB",
    "PYTHON_STDLIB_CHAT",
    "PYTHON_STDLIB_GRAPH",
    "RAGGED",
    "SIMPLE_TEMPLATE",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "Parameter",
    "RunPaths",
    "SansGPUError",
    "Space",
    "TrainingConfig",
    "UnreachableError",
    "acting_values",
    "as_config",
    "change_config",
    "default_values",
    "fold_seed",
    "identity",
    "load_config",
    "load_space",
    "measure_of",
    "problems",
    "recorded_values",
    "require_identity",
    "save_config",
    "spread",
]

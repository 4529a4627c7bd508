"""What was asked: the schema, its files and its errors. Nothing here loads torch."""

from sansgpu.config.by_task import FINE_TUNING, GRAPH, MASKED, PRETRAIN, PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, RAGGED
from sansgpu.config.errors import ConfigError, SansGPUError
from sansgpu.config.load import (
    PRESETS,
    acting_values,
    change_config,
    default_values,
    load_config,
    problems,
    save_config,
)
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import RunPaths
from sansgpu.config.schema import Config, DataConfig
from sansgpu.config.seeds import fold_seed
from sansgpu.config.training import TrainingConfig

__all__ = [
    "FINE_TUNING",
    "GRAPH",
    "MASKED",
    "PRESETS",
    "PRETRAIN",
    "PYTHON_STDLIB",
    "PYTHON_STDLIB_GRAPH",
    "RAGGED",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "RunPaths",
    "SansGPUError",
    "TrainingConfig",
    "acting_values",
    "change_config",
    "default_values",
    "fold_seed",
    "load_config",
    "problems",
    "save_config",
]

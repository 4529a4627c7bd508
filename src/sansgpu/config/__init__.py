"""What was asked: the schema, its files and its errors. Nothing here loads torch."""

from sansgpu.config.by_task import FINE_TUNING
from sansgpu.config.errors import ConfigError, SansGPUError
from sansgpu.config.load import PRESETS, acting_values, change_config, load_config, problems, save_config
from sansgpu.config.paths import RunPaths
from sansgpu.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from sansgpu.config.seeds import fold_seed

__all__ = [
    "FINE_TUNING",
    "PRESETS",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "RunPaths",
    "SansGPUError",
    "TrainingConfig",
    "acting_values",
    "change_config",
    "fold_seed",
    "load_config",
    "problems",
    "save_config",
]

"""The configuration schema, its files and its errors. Nothing in this package imports torch."""

from sansgpu.config.errors import ConfigError, SansGPUError, UnreachableError
from sansgpu.config.find import INPUT_KEYS, PRESETS, same_input
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
    recorded_values,
    save_config,
    setting,
)
from sansgpu.config.model import MAX_LEAVES, ModelConfig
from sansgpu.config.other_names import note_of, require_batch_size, with_own_names
from sansgpu.config.paths import ABANDONED_FOLDER, RunPaths
from sansgpu.config.schema import Config, DataConfig
from sansgpu.config.search_space import SearchParameter, Space, load_space, measure_of, spaced_values
from sansgpu.config.section import problems
from sansgpu.config.seeds import derive_seed
from sansgpu.config.tasks import (
    ARITHMETIC,
    BUILT_IN_NAMES,
    PYTHON_STDLIB,
    PYTHON_STDLIB_CHAT,
    PYTHON_STDLIB_GRAPH,
    SIMPLE_TEMPLATE,
    CardText,
    Metric,
    TaskSettings,
    import_class,
    task_class,
)
from sansgpu.config.training import TrainingConfig

__all__ = [
    "ABANDONED_FOLDER",
    "ARITHMETIC",
    "BUILT_IN_NAMES",
    "INPUT_KEYS",
    "MAX_LEAVES",
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
    "SearchParameter",
    "Space",
    "TaskSettings",
    "TrainingConfig",
    "UnreachableError",
    "acting_values",
    "as_config",
    "change_config",
    "default_values",
    "derive_seed",
    "flatten",
    "identity",
    "import_class",
    "load_config",
    "load_space",
    "measure_of",
    "note_of",
    "overridden_key",
    "problems",
    "recorded_values",
    "require_batch_size",
    "require_identity",
    "same_input",
    "save_config",
    "setting",
    "spaced_values",
    "task_class",
    "with_own_names",
]

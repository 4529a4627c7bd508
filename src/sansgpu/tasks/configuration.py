"""The table of tasks, and the configuration schema that is composed of the keys that they declare.

A task is a folder here with all its code. Its module `settings` declares the task without importing torch, so that a
configuration is validated quickly. To add or remove a task, add or remove its folder and its line in the table.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

from sansgpu.config import load
from sansgpu.config.parse import Values
from sansgpu.config.schema import Config, compose
from sansgpu.config.tasks import TaskSettings, import_class, imported_settings, is_outside, require_task_class

# Values of the key `task`, the default first, each with the other tasks whose code it imports.
TASK_FOLDERS: dict[str, tuple[str, ...]] = {
    "pretrain": ("classify",),
    "graph": (),
    "sft": (),
    "qa": (),
    "classify": ("embed",),
    "tokens": (),
    "embed": (),
    "static": ("embed",),
    "preference": ("sft",),
    "grpo": ("sft",),
}
DEFAULT_TASK = next(iter(TASK_FOLDERS))
_SETTINGS: list[TaskSettings] = [import_module(f"sansgpu.tasks.{task}.settings").SETTINGS for task in TASK_FOLDERS]
SCHEMA = compose(_SETTINGS)
ModelConfig, TrainingConfig, DataConfig = (SCHEMA.section_class(name) for name in ("model", "training", "data"))
_outside: dict[str, type[Config]] = {}  # schemas with the keys of a task outside the package, by the task


def schema_for(values: Values, trusted: bool = True) -> type[Config]:
    """Returns the schema for the values of a configuration, including the keys of a task outside the package.

    Imports the class of such a task if the values are `trusted`. Raises ConfigError if that fails. Otherwise, unless
    the class is already imported, the schema ignores unknown keys, because the class may declare them.
    """
    task = str(values.get("task"))
    if not is_outside(task):
        return SCHEMA
    settings = task_class(task).settings if trusted else imported_settings(task)
    if settings is None:
        return _tolerant_schema()
    if task not in _outside or settings not in _outside[task].tasks.tasks.values():
        _outside[task] = compose([*_SETTINGS, settings])
    return _outside[task]


@cache
def _tolerant_schema() -> type[Config]:
    return compose(_SETTINGS, unknown="ignore")


def task_class(kind: str) -> Any:
    """Imports the class of a kind of run, which may be outside the package. Raises ConfigError."""
    known = SCHEMA.tasks.kinds.get(kind)
    found = import_class(known.implementation if known else kind)
    require_task_class(found, kind)
    return found


def settings_of(kind: str) -> TaskSettings:
    """Returns the settings of a kind of run; see `TaskTable.settings_of`."""
    return SCHEMA.tasks.settings_of(kind)


def selected_settings(values: Values) -> TaskSettings:
    """Returns the settings of the kind of run that the values of a configuration select."""
    return settings_of(SCHEMA.tasks.kind_of(str(values.get("task")), values))


load_config = partial(load.load_config, schema_for)
recorded_values = partial(load.recorded_values, schema_for)
default_values = partial(load.default_values, SCHEMA)


def as_config(values: Values, where: str = "the configuration") -> Config:
    """Validates plain values. Raises ConfigError naming `where` and every problem."""
    return load.as_config(schema_for(values), values, where)

"""Finds the class of the configured task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from sansgpu.config import ConfigError, import_class
from sansgpu.config.errors import FINE_TUNING_PACKAGES, require
from sansgpu.config.schema import Config
from sansgpu.tasks.configuration import SCHEMA, task_class
from sansgpu.tasks.task import TaskClass


class _Tasks(Mapping[str, TaskClass]):
    """The built-in task classes by `Config.kind`, which are imported on first use."""

    def __getitem__(self, kind: str) -> TaskClass:
        found: TaskClass = task_class(kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(SCHEMA.tasks.kinds)

    def __len__(self) -> int:
        return len(SCHEMA.tasks.kinds)


TASKS = _Tasks()


def task_of(config: Config) -> TaskClass:
    """Returns the class of the task, or the class that `objective` names.

    Raises ConfigError if that class cannot be imported or is not a subclass of the task's class, or if the task
    fine-tunes Hugging Face models and the packages for them are not installed.
    """
    if config.settings.fine_tunes:
        require(f"task {config.settings.display_name}", *FINE_TUNING_PACKAGES)
    known = task_class(config.kind)
    if config.objective is None or config.objective == config.task:
        return cast(TaskClass, known)
    found = import_class(config.objective, "objective")
    if not (isinstance(found, type) and issubclass(found, known)):
        raise ConfigError(
            f"objective {config.objective} is not a subclass of {known.__module__}.{known.__name__}, which task "
            f"{config.task} requires; derive it from that class."
        )
    return cast(TaskClass, found)

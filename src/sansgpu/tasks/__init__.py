"""Training tasks. Each has one file with its model, batches, loss and metrics, and one line in the table below."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import cast

from sansgpu.config import Config, ConfigError
from sansgpu.tasks.task import (
    Collecting,
    Corpus,
    Evaluator,
    Gather,
    Objective,
    Sums,
    Task,
    TaskBase,
    TaskKind,
    add_sums,
)

_TABLE = {
    "pretrain": "pretrain:Pretrain",
    "graph": "graph:Graph",
    "masked": "masked_lm:MaskedLM",
    "sft": "sft:SFT",
    "qa": "qa:QA",
}


class _Tasks(Mapping[str, TaskKind]):
    """Task classes by `Config.kind`, imported on first use because some need transformers, which takes seconds."""

    def __getitem__(self, name: str) -> TaskKind:
        module, _, kind = _TABLE[name].partition(":")
        found: TaskKind = getattr(import_module(f"sansgpu.tasks.{module}"), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)


TASKS = _Tasks()


def task_of(config: Config) -> TaskKind:
    """Returns the task class of a configuration: the built-in one, or the class named by `objective`.

    Raises ConfigError if that class cannot be imported or is not derived from the built-in one.
    """
    known = TASKS[config.kind]
    if config.objective is None:
        return known
    module, _, name = config.objective.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"objective {config.objective} cannot be loaded ({error}); add its folder to Python's path: "
            "PYTHONPATH=. sansgpu train ..."
        ) from None
    base = cast(type, known)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"objective {config.objective} is not derived from {base.__module__}.{base.__name__}, which task "
            f"{config.task} needs."
        )
    return cast(TaskKind, found)


__all__ = [
    "TASKS", "Collecting", "Corpus", "Evaluator", "Gather", "Objective", "Sums", "Task", "TaskBase", "TaskKind",
    "add_sums", "task_of",
]  # fmt: skip

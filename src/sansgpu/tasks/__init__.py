"""What is learned. A kind of run is a model, its batches, its loss and its metrics: one file, and one line here."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import cast

from sansgpu.config import Config, ConfigError
from sansgpu.tasks.task import Collecting, Corpus, Evaluated, Gather, Objective, Sums, Task, TaskKind, add_sums

_TABLE = {
    "pretrain": "pretrain:Pretrain",
    "graph": "graph:Graph",
    "masked": "masked:MaskedLM",
    "sft": "sft:SFT",
    "qa": "qa:QA",
}


class _Tasks(Mapping[str, TaskKind]):
    """Kinds of runs by name (`Config.kind`), each imported when it is asked for: not all need transformers, which takes
    seconds.
    """

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
    """The class that does a run: its kind's, or the one its configuration names.

    Raises ConfigError where that cannot be imported, or is not derived from its kind's.
    """
    known = TASKS[config.kind]
    if config.objective is None:
        return known
    module, _, name = config.objective.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"objective {config.objective} cannot be loaded ({error}); its folder must be on Python's path: "
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
    "TASKS", "Collecting", "Corpus", "Evaluated", "Gather", "Objective", "Sums", "Task", "TaskKind", "add_sums",
    "task_of",
]  # fmt: skip

"""What is learned. A task is a model, its batches, its loss and its metrics: one file, and one line here."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from sansgpu.tasks.task import Corpus, Evaluated, Objective, Task, TaskKind

_TABLE = {"pretrain": "pretrain:Pretrain", "sft": "sft:SFT", "qa": "qa:QA"}


class _Tasks(Mapping[str, TaskKind]):
    """Tasks by name, each imported when it is asked for: transformers takes seconds that pretraining never needs."""

    def __getitem__(self, name: str) -> TaskKind:
        module, _, kind = _TABLE[name].partition(":")
        found: TaskKind = getattr(import_module(f"sansgpu.tasks.{module}"), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)


TASKS = _Tasks()

__all__ = ["TASKS", "Corpus", "Evaluated", "Objective", "Task", "TaskKind"]

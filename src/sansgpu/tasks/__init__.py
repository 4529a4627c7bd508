"""What is learned. A kind of run is a model, its batches, its loss and its metrics: one file, and one line here."""

from collections.abc import Iterator, Mapping
from importlib import import_module

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

__all__ = ["TASKS", "Collecting", "Corpus", "Evaluated", "Gather", "Objective", "Sums", "Task", "TaskKind", "add_sums"]

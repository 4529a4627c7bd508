"""What is learned. A task is a model, its batches, its loss and its metrics: one file, and one line here."""

from sansgpu.tasks.pretrain import Pretrain
from sansgpu.tasks.task import Corpus, Evaluated, Objective, Task, TaskKind

TASKS: dict[str, TaskKind] = {"pretrain": Pretrain}

__all__ = ["TASKS", "Corpus", "Evaluated", "Objective", "Pretrain", "Task", "TaskKind"]

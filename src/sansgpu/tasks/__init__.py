"""What is learned. A task is a model, its batches, its loss and its metrics: one file, and one line here."""

from sansgpu.tasks.pretrain import Pretrain
from sansgpu.tasks.task import Evaluated, Task

TASKS = {"pretrain": Pretrain}

__all__ = ["TASKS", "Evaluated", "Pretrain", "Task"]

"""Training tasks. Each has one file with everything about its kind of run, and one line in `config.by_task`."""

from collections.abc import Iterator, Mapping
from typing import cast

from sansgpu.config import Config, ConfigError, import_class, task_class
from sansgpu.config.by_task import TASK_CLASSES
from sansgpu.config.extras import FINE_TUNING, require
from sansgpu.tasks.base import TaskBase
from sansgpu.tasks.task import (
    Collecting,
    ComparedWithReference,
    Corpus,
    Evaluator,
    FittedHead,
    Gather,
    GatheringEvaluator,
    Objective,
    RankingEvaluator,
    ReferenceCorpus,
    SizedEvaluator,
    StepWideObjective,
    Sums,
    Task,
    TaskKind,
    add_sums,
)

__all__ = [
    "TASKS", "Collecting", "ComparedWithReference", "Corpus", "Evaluator", "FittedHead", "Gather",
    "GatheringEvaluator", "Objective", "RankingEvaluator", "ReferenceCorpus", "SizedEvaluator", "StepWideObjective",
    "Sums", "Task", "TaskBase", "TaskKind", "add_sums", "task_of",
]  # fmt: skip

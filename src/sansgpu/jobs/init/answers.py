"""The answers to the questions of `sansgpu init`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sansgpu.config import ConfigError, Override
from sansgpu.config.data import DataConfig
from sansgpu.config.load import key_and_value
from sansgpu.config.tasks import Purpose
from sansgpu.config.wording import counted, truncate
from sansgpu.data.sources import open_single
from sansgpu.jobs.init.corpora import corpus_named
from sansgpu.tasks.configuration import DEFAULT_TASK, SCHEMA

if TYPE_CHECKING:
    from sansgpu.planning.presets import Processor

MAX_HOURS = 24 * 365
_HOURS_PER_UNIT = {"": 1.0, "h": 1.0, "hour": 1.0, "hours": 1.0, "m": 1 / 60, "min": 1 / 60, "minutes": 1 / 60}
PURPOSES = {task: settings.purpose for task, settings in SCHEMA.tasks.kinds.items() if settings.purpose}


@dataclass(frozen=True)
class InitAnswers:
    """The user's answers: the data, the task, the time, the base model, the machine that will train, and other keys.

    `cores` and `memory` are None if `init` runs on that machine.
    """

    text: str
    task: str
    hours: float
    model: str | None = None
    cores: int | None = None
    memory: int | None = None  # bytes
    overrides: tuple[Override, ...] = ()

    @property
    def epochs(self) -> int | None:
        """The epochs that the user asks for, or None."""
        values = dict(key_and_value(override) for override in self.overrides)
        epochs = values.get("training.num_epochs")
        return epochs if isinstance(epochs, int) else None


def purposes_of(text: str) -> list[str]:
    """Returns the tasks that `init` offers for a dataset. For built-in data, these are the tasks that have any."""
    if corpus_named(text):
        return [DEFAULT_TASK]
    return [task for task, purpose in PURPOSES.items() if purpose.built_in or not is_built_in(text)]


def is_built_in(text: str) -> bool:
    return any(text == purpose.built_in for purpose in PURPOSES.values())


def require_text(text: str) -> None:
    """Raises ConfigError if `text` is neither a built-in dataset, nor a file or folder, nor a dataset on the Hub.

    The corpora with short names are not asked for, so that a machine without network can write the configuration.
    """
    if corpus_named(text) is None:
        open_single(text, DataConfig(dataset_name=text))


def parse_hours(text: str) -> float:
    """Parses a duration such as 2, 1.5h or 30m to hours. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)", text.strip().lower())
    hours = float(match[1]) * _HOURS_PER_UNIT.get(match[2], math.nan) if match else math.nan
    if not 0 < hours <= MAX_HOURS:
        raise ConfigError(
            f"the time {truncate(text)!r} is not valid; write hours or minutes up to a year, e.g. 2h or 30m."
        )
    return hours


def checked(answers: InitAnswers) -> tuple[Purpose, InitAnswers]:
    """Returns the purpose of the task, and the answers with the task's own built-in data if any is the answer.

    Raises ConfigError if the answers contradict each other.
    """
    purpose = PURPOSES.get(answers.task)
    if purpose is None:
        raise ConfigError(f"--task is {truncate(answers.task)!r}, but must be one of {', '.join(PURPOSES)}.")
    if answers.task not in purposes_of(answers.text):
        raise ConfigError(
            f"task {answers.task} cannot learn from {truncate(answers.text)}; set --text to a file or folder with "
            f"{purpose.rows}."
        )
    if purpose.model is None and answers.model:
        raise ConfigError(f"task {answers.task} trains from scratch; remove --model.")
    if is_built_in(answers.text):
        answers = replace(answers, text=str(purpose.built_in))
    return purpose, answers


def machine_of(answers: InitAnswers) -> tuple[Processor, int]:
    """Returns processor and memory of the machine that will train; its cores are assumed to be as fast as these."""
    import torch

    from sansgpu.machine.probe import memory_for_run
    from sansgpu.planning.presets import Processor, this_machine

    here = this_machine(SCHEMA())
    memory = answers.memory or memory_for_run(torch.device("cpu"))
    if answers.cores is None:
        return replace(here, name=f"this machine with {counted(here.cores, 'core')}"), memory
    rate = here.gemm_flops_per_second * answers.cores / here.cores
    name = f"a machine with {counted(answers.cores, 'core')}, each as fast as one of this machine,"
    return Processor(name, answers.cores, here.precision, rate), memory

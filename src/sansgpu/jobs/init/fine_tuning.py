"""Configures the fine-tuning of a model, so that it fits into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sansgpu.config import ConfigError, change_config
from sansgpu.config.schema import Config
from sansgpu.config.tasks import Purpose
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.jobs.init.answers import InitAnswers
from sansgpu.tasks.configuration import as_config

LEAST_STEPS, MAX_EPOCHS, USUAL_BATCH = 60, 20, 16
USUAL_INTERVAL, LEAST_EVALUATIONS, MOST_STEPS_TO_SHOW_ALL = 50, 5, 100
# Fine-tuning of a decoder: low-rank matrices need little memory beyond the model's own.
_ADAPTER: dict[str, Any] = {"adapter": "lora", "lora_rank": 16, "lora_alpha": 32}


@dataclass(frozen=True)
class FittingRun:
    """A configuration that fits into memory, and what it needs of it in bytes."""

    config: Config
    needed: int
    available: int


def epochs_for(rows: float, purpose: Purpose) -> int:
    """Returns how often to read a dataset: at least as often as usual, and few rows up to MAX_EPOCHS times.

    Steps, not epochs, are what small datasets lack: Mosbach et al., arXiv 2006.04884, train 20 epochs on them.
    """
    steps = max(1.0, rows / (purpose.batch or USUAL_BATCH))
    return max(purpose.epochs, min(MAX_EPOCHS, math.ceil(LEAST_STEPS / steps)))


def evaluation_interval(steps: float) -> int:
    """Returns the steps between evaluations: a run of few steps has some, too."""
    return max(5, int(min(USUAL_INTERVAL, steps / LEAST_EVALUATIONS)))


def fine_tuning_config(answers: InitAnswers, purpose: Purpose, rows: float | None = None) -> Config:
    """Returns the configuration for the answers, before it is made to fit into memory. Raises ConfigError.

    `rows` is the number of rows in the data; None: it is unknown, so that the usual epochs and intervals are taken.
    """
    epochs = epochs_for(rows, purpose) if rows else purpose.epochs
    steps = epochs * rows / (purpose.batch or USUAL_BATCH) if rows else math.inf
    # Steps of a short run may take seconds, so each is shown.
    logged = {"logging_steps": 1} if steps <= MOST_STEPS_TO_SHOW_ALL else {}
    batch = {"batch_size": "auto", "gradient_accumulation_steps": purpose.batch} if purpose.batch else {}
    config = as_config(
        {
            "task": answers.task,
            "model": {
                "name_or_path": answers.model or purpose.model,
                **(_ADAPTER if purpose.is_decoder else {}),
            },
            "training": {
                **batch,
                "num_epochs": epochs,
                "max_hours": answers.hours,
                **logged,
                "save_steps": USUAL_INTERVAL,
                "eval_steps": evaluation_interval(steps),
            },
            "data": {"dataset_name": answers.text},
        }
    )
    return change_config(config, answers.overrides)


def fitting_run(config: Config, answers: InitAnswers, progress: ReportProgress, warn: Warn) -> FittingRun | None:
    """Returns the configuration with the mildest changes that make it fit. Raises ConfigError if nothing does.

    If the model cannot be read from this machine, calls `warn` and returns None.
    """
    progress("estimating memory", 0, 0)
    from sansgpu.planning.memory_fit import changes_that_fit
    from sansgpu.planning.resolve import ResolveOptions, ignore_message, resolve_run
    from sansgpu.tasks.registry import task_of

    try:
        options = ResolveOptions("report", data="unread", timed="never")
        sized = task_of(config).with_vocabulary(config)
        run = resolve_run(sized, progress, ignore_message, options)
    except ConfigError as error:
        warn(f"{str(error).rstrip('.')}; the memory estimate is therefore skipped.")
        return None
    rate = [("training.learning_rate", run.config.training.learning_rate)]
    config, sized = change_config(config, rate), change_config(sized, rate)
    memory = answers.memory or run.available
    if run.memory.fits(memory):
        return FittingRun(config, run.memory.least, memory)
    changes = changes_that_fit(sized, run.execution, memory)
    if not changes:
        raise ConfigError(f"this model does not fit into {memory / 1e9:.1f} GB of memory; choose a smaller one.")
    return FittingRun(change_config(config, changes[0].settings), changes[0].memory.least, memory)

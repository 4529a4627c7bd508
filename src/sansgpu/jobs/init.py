"""Writes a configuration from the answers to four questions: which data, which task, how long, which machine."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sansgpu.config import ConfigError, change_config
from sansgpu.config.data import DataConfig
from sansgpu.config.load import commented_yaml
from sansgpu.config.schema import Config
from sansgpu.config.tasks import Purpose
from sansgpu.config.wording import counted, truncate
from sansgpu.data.sources import open_single
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_failures_as, write_text
from sansgpu.jobs.corpora import HubCorpus, corpus_named
from sansgpu.tasks.configuration import DEFAULT_TASK, SCHEMA, as_config

if TYPE_CHECKING:
    from sansgpu.planning.presets import Processor
    from sansgpu.planning.propose import ProposedRun

DEFAULT_FILE, DEFAULT_HOURS = Path("sansgpu.yaml"), "1"
SUFFIXES = (".yaml", ".yml")
MAX_HOURS = 24 * 365
CORPUS_BYTES = (0.99e8, 0.99e9, 1e15)  # most bytes to download of a corpus, each with a larger vocabulary
SPARE_TOKENS = 1.5  # tokens to download / tokens that the run is expected to read, which is an estimate
_HOURS_PER_UNIT = {"": 1.0, "h": 1.0, "hour": 1.0, "hours": 1.0, "m": 1 / 60, "min": 1 / 60, "minutes": 1 / 60}
# Fine-tuning of a decoder: low-rank matrices need little memory beyond the model's own.
_ADAPTER: dict[str, Any] = {"adapter": "lora", "lora_rank": 16, "lora_alpha": 32}
PURPOSES = {task: settings.purpose for task, settings in SCHEMA.tasks.kinds.items() if settings.purpose}


@dataclass(frozen=True)
class InitAnswers:
    """The user's answers: the data, the task, the time, the base model, and the machine that will train.

    `cores` and `memory` are None if `init` runs on that machine.
    """

    text: str
    task: str
    hours: float
    model: str | None = None
    cores: int | None = None
    memory: int | None = None  # bytes


def purposes_of(text: str) -> list[str]:
    """Returns the tasks that `init` offers for a dataset. For built-in data, these are the tasks that have any."""
    if corpus_named(text):
        return [DEFAULT_TASK]
    return [task for task, purpose in PURPOSES.items() if purpose.built_in or not _is_built_in(text)]


def _is_built_in(text: str) -> bool:
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


def _duration(hours: float) -> str:
    minutes = round(hours * 60, 1)
    return counted(int(minutes), "minute") if minutes < 120 and minutes == int(minutes) else f"{hours:g} hours"


def require_new(file: Path, force: bool) -> None:
    """Raises ConfigError if the file to write exists, unless with `force`, or cannot be a configuration."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{truncate(str(file))} does not end in .yaml or .yml; choose e.g. {DEFAULT_FILE}.")
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise ConfigError(f"{file} is not a regular file; choose another name.")
    if file.exists() and not force:
        raise ConfigError(f"{file} already exists; choose another name, or add --force to replace it.")


def init(file: Path, answers: InitAnswers, force: bool, progress: ReportProgress, warn: Warn) -> dict[str, Any]:
    """Writes the file and returns its path, the configuration and the next commands. Raises ConfigError."""
    require_new(file, force)
    purpose = PURPOSES.get(answers.task)
    if purpose is None:
        raise ConfigError(f"--task is {truncate(answers.task)!r}, but must be one of {', '.join(PURPOSES)}.")
    if answers.task not in purposes_of(answers.text):
        raise ConfigError(
            f"task {answers.task} cannot learn from {truncate(answers.text)}; set --text to a file or folder with "
            f"{purpose.rows}."
        )
    from_scratch = purpose.model is None
    if from_scratch and answers.model:
        raise ConfigError(f"task {answers.task} trains from scratch; remove --model.")
    if _is_built_in(answers.text):
        answers = replace(answers, text=str(purpose.built_in))
    if from_scratch:
        config, head = _from_scratch(answers, progress)
    else:
        config, head = _fine_tuned(answers, purpose, progress, warn)
    comments = {
        **({} if from_scratch else {"training.learning_rate": "peak learning rate"}),
        "training.num_epochs": "maximum passes over the training split",
        "training.max_hours": f"maximum hours; the run ends after {_duration(answers.hours)}, or after num_epochs if "
        "that is earlier",
        "data.dataset_name": f"data to train on: {purpose.rows}. {_origin(answers.text)}",
    }
    with write_failures_as(ConfigError, file):
        write_text(file, commented_yaml(config, f"Written by `sansgpu init`. {head}", comments))
    commands = [shlex.join(["sansgpu", command, str(file)]) for command in ("plan", "train")]
    return {"file": str(file), "summary": head, "commands": commands}


def _origin(text: str) -> str:
    if corpus := corpus_named(text):
        return f"{corpus.title}: downloaded as far as data.max_tokens needs."
    if _is_built_in(text):
        return "This dataset is built from Python's standard library, which every machine has."
    return "A relative path is relative to the working directory, or else to the folder of this file."


def _from_scratch(answers: InitAnswers, progress: ReportProgress) -> tuple[Config, str]:
    """Chooses the model with the lowest expected loss after the given time on the machine; also returns a comment."""
    progress("timing matrix products", 0, 0)
    from sansgpu.planning.propose import propose_quickly  # torch takes seconds, and the questions do not need it

    processor, memory = _machine(answers)
    corpus = corpus_named(answers.text)
    if corpus is None:
        size = open_single(answers.text, DataConfig(dataset_name=answers.text)).size_bytes
        best = propose_quickly(answers.text, size, answers.hours, processor, memory)
    else:
        best = _of_corpus(corpus, answers.hours, processor, memory)
    head = (
        f"A decoder with {best.parameters / 1e6:.1f}M parameters, chosen for {_duration(answers.hours)} on "
        f"{processor.name} and {memory / 1e9:.0f} GB of memory. `sansgpu plan` measures how much of the data it can "
        "train on in that time."
    )
    return best.config, head


def _of_corpus(corpus: HubCorpus, hours: float, processor: Processor, memory: int) -> ProposedRun:
    """Proposes a run that downloads as many tokens as it may read in one epoch, with a vocabulary size for that."""
    from sansgpu.planning.propose import BYTES_PER_TOKEN, propose_quickly

    for text_bytes in CORPUS_BYTES:
        best = propose_quickly(corpus.dataset, text_bytes, hours, processor, memory)
        tokens = math.ceil(SPARE_TOKENS * best.tokens / 100_000) * 100_000
        if tokens * BYTES_PER_TOKEN <= text_bytes:
            break
    subset = [] if corpus.subset is None else [f"data.dataset_config={corpus.subset}"]
    settings = [*subset, "data.streaming=true", f"data.max_tokens={tokens}"]
    return replace(best, config=change_config(best.config, settings))


def _fine_tuned(answers: InitAnswers, purpose: Purpose, progress: ReportProgress, warn: Warn) -> tuple[Config, str]:
    """Returns a fine-tuning configuration, which fits into memory if that can be estimated, and a comment."""
    model = answers.model or purpose.model
    batch = {"batch_size": "auto", "gradient_accumulation_steps": purpose.batch} if purpose.batch else {}
    config = as_config(
        {
            "task": answers.task,
            "model": {"name_or_path": model, **(_ADAPTER if purpose.is_decoder else {})},
            "training": {
                **batch,
                "num_epochs": purpose.epochs,
                "max_hours": answers.hours,
                "save_steps": 50,
                "eval_steps": 50,
            },
            "data": {"dataset_name": answers.text},
        }
    )
    config = _fitting(config, answers, progress, warn)
    method = "a LoRA adapter" if purpose.is_decoder else purpose.trained
    return config, f"Fine-tunes {method} of {model} to {purpose.words}, within {_duration(answers.hours)}."


def _fitting(config: Config, answers: InitAnswers, progress: ReportProgress, warn: Warn) -> Config:
    """Returns the configuration with the mildest changes that make it fit. Raises ConfigError if nothing does.

    If the model cannot be read from this machine, calls `warn` and returns the configuration unchanged.
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
        return config
    memory = answers.memory or run.available
    if run.memory.fits(memory):
        return config
    changes = changes_that_fit(sized, run.execution, memory)
    if not changes:
        raise ConfigError(f"this model does not fit into {memory / 1e9:.1f} GB of memory; choose a smaller one.")
    return change_config(config, changes[0].settings)


def _machine(answers: InitAnswers) -> tuple[Processor, int]:
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

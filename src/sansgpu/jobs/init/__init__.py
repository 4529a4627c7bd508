"""Writes a configuration from the answers to four questions: which data, which task, which machine, how long."""

from __future__ import annotations

import math
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sansgpu.config import ConfigError, change_config
from sansgpu.config.load import commented_yaml
from sansgpu.config.schema import Config
from sansgpu.config.tasks import Purpose
from sansgpu.config.wording import counted, truncate
from sansgpu.data.sources import BYTES_PER_TOKEN
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_failures_as, write_text
from sansgpu.jobs.init.answers import InitAnswers, checked, is_built_in, machine_of
from sansgpu.jobs.init.corpora import HubCorpus, corpus_named
from sansgpu.jobs.init.fine_tuning import fine_tuning_config, fitting_run
from sansgpu.jobs.init.hours import text_bytes_of
from sansgpu.jobs.init.sample import sample_rows

if TYPE_CHECKING:
    from sansgpu.planning.presets import Processor
    from sansgpu.planning.propose import ProposedRun

DEFAULT_FILE = Path("sansgpu.yaml")
SUFFIXES = (".yaml", ".yml")
CORPUS_BYTES = (0.99e8, 0.99e9, 1e15)  # most bytes to download of a corpus, each with a larger vocabulary
SPARE_TOKENS = 1.5  # tokens to download / tokens that the run is expected to read, which is an estimate


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
    purpose, answers = checked(answers)
    if purpose.model is None:
        config, head = _from_scratch(answers, progress)
    else:
        config, head = _fine_tuned(answers, purpose, progress, warn)
    knows_rate = "learning_rate" in config.training.model_fields_set  # it depends on the model
    comments = {
        **({"training.learning_rate": "peak learning rate"} if knows_rate else {}),
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
    if is_built_in(text):
        return "This dataset is built from Python's standard library, which every machine has."
    return "A relative path is relative to the working directory, or else to the folder of this file."


def _from_scratch(answers: InitAnswers, progress: ReportProgress) -> tuple[Config, str]:
    """Chooses the model with the lowest expected loss after the given time on the machine; also returns a comment."""
    progress("timing matrix products", 0, 0)
    from sansgpu.planning.propose import propose_quickly  # torch takes seconds, and the questions do not need it

    processor, memory = machine_of(answers)
    corpus = corpus_named(answers.text)
    if corpus is None:
        size = text_bytes_of(answers, progress)
        best = propose_quickly(answers.text, size, answers.hours, processor, memory)
    else:
        best = _of_corpus(corpus, answers.hours, processor, memory)
    head = (
        f"A decoder with {best.parameters / 1e6:.1f}M parameters, chosen for {_duration(answers.hours)} on "
        f"{processor.name} and {memory / 1e9:.0f} GB of memory. `sansgpu plan` measures how much of the data it can "
        "train on in that time."
    )
    return change_config(best.config, answers.overrides), head


def _of_corpus(corpus: HubCorpus, hours: float, processor: Processor, memory: int) -> ProposedRun:
    """Proposes a run that downloads as many tokens as it may read in one epoch, with a vocabulary size for that."""
    from sansgpu.planning.propose import propose_quickly

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
    config = fine_tuning_config(answers, purpose)
    with suppress(ConfigError):  # the data cannot be read here
        config = fine_tuning_config(answers, purpose, sample_rows(config, progress).rows)
    fitting = fitting_run(config, answers, progress, warn)
    method = "a LoRA adapter" if purpose.is_decoder else purpose.trained
    model = config.model.name_or_path
    head = f"Fine-tunes {method} of {model} to {purpose.words}, within {_duration(answers.hours)}."
    return fitting.config if fitting else config, head

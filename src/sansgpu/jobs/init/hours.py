"""Proposes a training time that suits the data, the task, the model and the machine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sansgpu.config import ConfigError, change_config
from sansgpu.config.schema import Config
from sansgpu.config.wording import count, counted, duration
from sansgpu.data.sources import BYTES_PER_TOKEN
from sansgpu.events.progress import ReportProgress
from sansgpu.jobs.init.answers import InitAnswers, checked, machine_of
from sansgpu.jobs.init.corpora import corpus_named
from sansgpu.jobs.init.fine_tuning import (
    FittingRun,
    epochs_for,
    evaluation_interval,
    fine_tuning_config,
    fitting_run,
)
from sansgpu.jobs.init.sample import DataSample, reading_config, sample_rows
from sansgpu.tasks.configuration import as_config

DEFAULT_HOURS = "1"  # if the data or the model cannot be read here, or the data have no end
# Proposed time / estimated time, and least seconds to propose. They let num_epochs end the run although the time is an
# estimate and other programs use the processor, too.
MARGIN, LEAST_SECONDS = 2.0, 180
# Times to propose: in minutes, and in hours.
_MINUTES, _HOURS = (1, 2, 3, 5, 10, 15, 20, 30, 45), (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
LONGEST = _HOURS[-1]
_COLUMN_KEYS = "_column", "separator", "encoding"  # ends of the keys that say how the files are read


@dataclass(frozen=True)
class TimeProposal:
    """A training time such as 20m or 1.5h, and why it is proposed."""

    time: str
    reason: str


@dataclass(frozen=True)
class _FineTuningLength:
    """The estimated length of a run on all data."""

    steps: int
    seconds: float


def propose_time(answers: InitAnswers, progress: ReportProgress) -> TimeProposal:
    """Returns the time that the data are worth on the machine, at most a day. `answers.hours` is not used.

    Reads the first rows of the data and times no steps, so that large data and models take seconds, too. Raises
    ConfigError if the answers contradict each other, the data cannot be read or the model does not fit.
    """
    purpose, answers = checked(answers)
    if corpus_named(answers.text):
        return TimeProposal(DEFAULT_HOURS, "the corpus is larger than any run reads, so more time gives a better model")
    if purpose.model is None:
        return _from_scratch(answers, progress)
    config = fine_tuning_config(answers, purpose)
    problems = list[str]()
    fitting = fitting_run(config, answers, progress, problems.append)
    if fitting is None:  # writing the configuration warns about it
        return TimeProposal(DEFAULT_HOURS, "the model cannot be read here, so its speed is unknown")
    try:
        sample = sample_rows(config, progress)
        if not sample.values:
            raise ConfigError(f"{answers.text} has no rows that task {answers.task} can read; choose another task")
        epochs = answers.epochs or epochs_for(sample.rows, purpose)
        length = _fine_tuning_length(_for_canonical_rows(fitting.config), epochs, sample, answers, progress)
    except ConfigError as error:
        return TimeProposal(DEFAULT_HOURS, f"a run would stop, because {str(error).rstrip('.')}")
    return _of_fine_tuning(epochs, fitting, length)


def round_time(seconds: float) -> tuple[str, float]:
    """Rounds up to a time that a person would choose, at most a day, and returns it as text and in hours."""
    minutes = next((minutes for minutes in _MINUTES if minutes * 60 >= seconds), None)
    if minutes is not None:
        return f"{minutes}m", minutes / 60
    hours = next((hours for hours in _HOURS if hours * 3600 >= seconds), LONGEST)
    return f"{hours:g}h", hours


def _from_scratch(answers: InitAnswers, progress: ReportProgress) -> TimeProposal:
    progress("timing matrix products", 0, 0)
    from sansgpu.planning.propose import propose_length

    text_bytes = text_bytes_of(answers, progress)
    processor, memory = machine_of(answers)
    found = propose_length(answers.text, text_bytes, LONGEST, processor, memory)
    time, _ = round_time(found.run.seconds)
    run = found.run
    reason = (
        f"a decoder with {count(run.parameters)} parameters reads the text {_times(run.epochs)}; twice the time would "
        f"lower the expected loss by only {max(0.0, found.gain):.0%}"
    )
    once = text_bytes / BYTES_PER_TOKEN / run.tokens_per_second
    if once > LONGEST * 3600:
        reason += f"; to read all of it once would take it {days(once)}"
    return TimeProposal(time, reason)


def text_bytes_of(answers: InitAnswers, progress: ReportProgress) -> float:
    """Returns the bytes of text in the training data; an estimate if the data are large."""
    return sample_rows(reading_config(answers.text, answers.task, answers.overrides), progress).text_bytes


def _times(epochs: float) -> str:
    return f"{epochs:.0f} times" if epochs > 1.95 else f"{epochs:.1f} times"


def days(seconds: float) -> str:
    """Formats a long duration, e.g. 9 days or 30 hours."""
    return counted(round(seconds / 86400), "day") if seconds > 2 * 86400 else f"{seconds / 3600:.0f} hours"


def _for_canonical_rows(config: Config) -> Config:
    """Returns a configuration without the keys that name columns, which canonical rows have under their usual names."""
    values = config.given_values()
    data = values.get("data", {})
    values["data"] = {key: value for key, value in data.items() if not key.endswith(_COLUMN_KEYS)}
    return as_config(values)


def _of_fine_tuning(number: int, fitting: FittingRun, length: _FineTuningLength) -> TimeProposal:
    time, hours = round_time(max(LEAST_SECONDS, length.seconds * MARGIN))
    steps = f"{counted(length.steps, 'step')} of about {_step(length.seconds / length.steps)}"
    epochs = counted(number, "epoch", "epochs")
    memory = f"the model needs {fitting.needed / 1e9:.1f} of {fitting.available / 1e9:.1f} GB of memory"
    if length.seconds > LONGEST * 3600:
        share = number * hours * 3600 / length.seconds
        return TimeProposal(
            time, f"{epochs} ({steps}) would take {days(length.seconds)}, of which a day is {share:.1f}; {memory}"
        )
    return TimeProposal(time, f"{epochs} take {steps}, {duration(length.seconds)} in all; {memory}")


def _step(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds > 9.5 else f"{seconds:.2g} s"


def _fine_tuning_length(
    config: Config, epochs: int, sample: DataSample, answers: InitAnswers, progress: ReportProgress
) -> _FineTuningLength:
    """Estimates the run from the examples that its task makes of the sample."""
    from sansgpu.data.order import steps_per_epoch
    from sansgpu.machine.memory import effective_batch
    from sansgpu.planning.forecast import forecast_of
    from sansgpu.planning.propose import OVERHEAD_RATIO
    from sansgpu.planning.resolve import ResolveOptions, Timed, ignore_message, resolve_run
    from sansgpu.train.run import EVALUATED_IN_A_STEP

    # Only steps that generate text are timed: for others, the rate of matrix products tells enough.
    timed: Timed = "always" if config.settings.generates else "never"
    with TemporaryDirectory(prefix="sansgpu-init-") as folder:
        rows = Path(folder) / "rows.jsonl"
        lines = (json.dumps(value, default=str) for value in sample.values)
        rows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        changed = change_config(config, [("data.dataset_name", str(rows)), ("data.cache_dir", folder)])

        def named(doing: str, done: int, total: int, unit: str = "byte") -> None:
            progress(doing.replace(str(rows), answers.text), done, total, unit)

        try:
            run = resolve_run(changed, named, ignore_message, ResolveOptions("report", timed=timed))
        except ConfigError as error:
            raise ConfigError(re.sub(re.escape(str(rows)) + r"(, line \d+)?", answers.text, str(error))) from None
    training, batch = run.config.training, effective_batch(run.config.training)
    scale = sample.rows / len(sample.values)
    examples = scale * run.corpus.train_examples
    if sample.has_validation:
        examples /= 1 - run.config.data.validation_split
    steps = max(1, epochs * steps_per_epoch(round(examples), batch))
    processor, _ = machine_of(answers)
    if run.timing is not None:
        step_seconds = forecast_of(run).step_seconds
    else:
        work = run.costs.work(run.tokens_per_step)
        step_seconds = run.tokens_per_step / processor.tokens_per_second(work.needed / run.tokens_per_step)
    evaluations = steps // min(training.eval_steps, evaluation_interval(steps)) + 1 if training.eval_steps else 1
    evaluated = scale * run.corpus.validation_tokens / run.tokens_per_step / EVALUATED_IN_A_STEP
    return _FineTuningLength(steps, (steps + evaluations * evaluated) * step_seconds / (1 - OVERHEAD_RATIO))

"""The commands `sansgpu init`, `doctor` and `bench`. Like `plan`, they are under the heading Start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sansgpu.cli.options import (
    ConfigArgument,
    JsonOption,
    OverrideOption,
    checked_config,
    complain,
    flag,
    number_option,
    option,
    path_option,
    preparation_bar,
    print_json,
    print_result,
    show,
    warn,
    with_fields,
)

if TYPE_CHECKING:
    from sansgpu.jobs.init.answers import InitAnswers

# Asks a question. Arguments: the flag that answers it, the question, the default, and a check of the answer.
Ask = Callable[[str, str, str, Callable[[str], object]], str]
MAX_CORES = 100_000
_ANSWERS = "Answers"
_MEASUREMENT = "Measurement"


def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine can do and how to speed it up.

    Example: sansgpu doctor
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.doctor import doctor as job
        from sansgpu.views.tables import print_doctor

        report = job(bar)
    print_result(asdict(report), as_json, print_doctor)


@dataclass(frozen=True, kw_only=True)
class _BenchOptions:
    config: ConfigArgument = None
    override: OverrideOption = None
    steps: Annotated[int, option("Number of steps to time.", _MEASUREMENT, min=2)] = 20
    output_dir: Annotated[Path | None, path_option("Folder for the report. Default: bench/NAME.", "DIR")] = None
    from_step: Annotated[int, option("Also project the time of a run resumed from this step.", _MEASUREMENT, min=0)] = 0
    targets: Annotated[
        str | None,
        option(
            "Step counts to project the training time for. Default: 100 to 100,000.", _MEASUREMENT, metavar="N,N,..."
        ),
    ] = None
    start: Annotated[
        str | None,
        option("Start time of the projected runs, e.g. 18:00 or 6PM. Default: now.", _MEASUREMENT, metavar="TIME"),
    ] = None
    what_if: Annotated[
        bool | None,
        flag(
            "Also measure all standard variations of the configuration, or none. Default: as many as fit in two "
            "minutes.",
            _MEASUREMENT,
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        option(
            "Also measure other values of a key, e.g. model.n_layers=4,8. Repeatable.",
            _MEASUREMENT,
            metavar="KEY.PATH=VALUE,...",
        ),
    ] = None
    forward_only: Annotated[
        bool, flag("Time only forward passes, on random tokens. No data is read.", _MEASUREMENT, "--forward-only")
    ] = False
    gpu_tflops: Annotated[
        float | None, number_option("Compare with an estimate for a GPU with this many TFLOP/s.", _MEASUREMENT, least=0)
    ] = None
    as_json: JsonOption = False


@with_fields
def bench(given: _BenchOptions) -> None:
    """Measure training speed and find faster settings.

    Writes report.md, report.html, optimized.yaml and start.sh.

    Example: sansgpu bench configs/cpu_small.yaml --set data.dataset_name=notes/ --vary training.threads=1,2
    """
    if given.forward_only and (given.vary or given.targets or given.start):
        raise typer.BadParameter("--vary, --targets and --start require training steps; remove --forward-only")
    checked_config(given.config, given.override or [])
    folder = given.output_dir or Path("bench") / (given.config.stem if given.config else "default")
    with preparation_bar() as bar:
        from sansgpu.jobs.bench import BenchRequest
        from sansgpu.jobs.bench import bench as job
        from sansgpu.planning.forecast import start_time, target_steps
        from sansgpu.views.bench import print_bench, print_forward

        request = BenchRequest(
            given.config, tuple(given.override or ()), folder, given.steps, given.from_step,
            targets=target_steps(given.targets) if given.targets else (),
            start=start_time(given.start) if given.start else None,
            what_if=given.what_if,
            vary=tuple(given.vary or ()),
            forward_only=given.forward_only,
            gpu_flops_per_second=given.gpu_tflops * 1e12 if given.gpu_tflops else None,
        )  # fmt: skip
        result: Any = job(request, bar, warn)
    print_result(result, given.as_json, print_forward if given.forward_only else print_bench)


@dataclass(frozen=True, kw_only=True)
class _InitOptions:
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to write. Default: sansgpu.yaml.", show_default=False)
    ] = None
    text: Annotated[
        str | None,
        option(
            "Data to train on: file, folder, Hub name, python-stdlib (built in); or fineweb-edu, climbmix, tinystories "
            "or wikipedia-LANGUAGE, from the Hub as far as needed.",
            _ANSWERS,
        ),
    ] = None
    task: Annotated[str | None, option("Task, e.g. pretrain, sft or classify.", _ANSWERS)] = None
    model: Annotated[
        str | None, option("Model to fine-tune: run folder, Hugging Face model or GGUF file.", _ANSWERS)
    ] = None
    hours: Annotated[str | None, option("Training time, e.g. 2h or 30m.", _ANSWERS, metavar="TIME")] = None
    override: OverrideOption = None
    cores: Annotated[
        int | None,
        option(
            "Number of cores of the machine that will train. Default: this machine's.", _ANSWERS, min=1, max=MAX_CORES
        ),
    ] = None
    memory: Annotated[
        str | None,
        option("Memory of the machine that will train, e.g. 64GB. Default: this machine's.", _ANSWERS, metavar="SIZE"),
    ] = None
    yes: Annotated[
        bool, flag("Use the default for every question that the options do not answer.", None, "--yes", "-y")
    ] = False
    force: Annotated[bool, flag("Replace an existing file.", None, "--force")] = False
    as_json: JsonOption = False


@with_fields
def init(given: _InitOptions) -> None:
    """Ask four questions and write a configuration.

    Example: sansgpu init notes.yaml --text notes/ --task pretrain --hours 2h --yes
    """
    from sansgpu.jobs.init import DEFAULT_FILE, require_new

    target = given.file or DEFAULT_FILE
    require_new(target, given.force)
    answers = _answers(given, _asker(given.yes))
    with preparation_bar() as bar:
        from sansgpu.jobs.init import init as job

        result = job(target, answers, given.force, bar, warn)
    if given.as_json:
        print_json(result)
        return
    show(f"{result['summary']}\n\nWritten to {result['file']}. Next:\n")
    show("\n".join(f"  {command}" for command in result["commands"]))


def _answers(given: _InitOptions, ask: Ask) -> InitAnswers:
    """Asks for each answer that is not given and checks all of them."""
    from sansgpu.config import PYTHON_STDLIB
    from sansgpu.jobs.init.answers import PURPOSES, InitAnswers, parse_hours, purposes_of
    from sansgpu.jobs.init.answers import require_text as check_text
    from sansgpu.jobs.init.corpora import SHORT_NAMES

    text, task, model, cores, memory = given.text, given.task, given.model, given.cores, given.memory
    if given.hours is not None:
        parse_hours(given.hours)
    if memory is not None:
        _bytes(memory)
    if text is None:
        question = f"What data? A file, a folder, a Hub name or {', '.join(SHORT_NAMES)}; {PYTHON_STDLIB} is built in"
        text = ask("--text", question, PYTHON_STDLIB, check_text)
    else:
        check_text(text)
    if task is None:
        tasks = purposes_of(text)
        width = max(map(len, tasks))
        lines = "\n".join(
            f"  {name:<{width}}  {PURPOSES[name].words}; requires {PURPOSES[name].rows}" for name in tasks
        )
        proposed = _proposed_task(text, tasks)
        task = ask("--task", f"What should the model do?\n{lines}\nTask", proposed, _one_of(tasks))
    base = PURPOSES[task].model if task in PURPOSES else None
    if base and model is None:
        model = ask("--model", "Which model to start from? A folder, a GGUF file or a Hub name", base, lambda _: None)
    if cores is None and memory is None:
        cores, memory = _machine(ask)
    answers = InitAnswers(
        text, task, 1.0, model, cores, None if memory is None else _bytes(memory), tuple(given.override or ())
    )
    hours = given.hours
    if hours is None:
        question = "How long may training take? Hours or minutes, e.g. 2h or 30m"
        hours = ask("--hours", question, _proposed_time(answers), parse_hours)
    return replace(answers, hours=parse_hours(hours))


def _proposed_time(answers: InitAnswers) -> str:
    """Returns the time that the data are worth, and prints why."""
    with preparation_bar() as bar:
        from sansgpu.jobs.init.hours import propose_time

        proposal = propose_time(answers, bar)
    complain(f"time {proposal.time}: {proposal.reason}.")
    return proposal.time


def _proposed_task(text: str, tasks: list[str]) -> str:
    """Returns the one of `tasks` that fits the first rows of the data best, and prints why."""
    from sansgpu.config import ConfigError
    from sansgpu.jobs.init.corpora import corpus_named
    from sansgpu.jobs.init.sample import recognize
    from sansgpu.tasks.configuration import DEFAULT_TASK

    if corpus_named(text):
        return DEFAULT_TASK
    try:
        with preparation_bar() as bar:
            task, sample = recognize(text, tasks, bar)
    except ConfigError as error:
        warn(f"{str(error).rstrip('.')}; task {DEFAULT_TASK} is proposed.")
        return DEFAULT_TASK
    complain(f"{text}: {sample.describe()}, for task {task}; `sansgpu data {text}` shows more.")
    return task


def _machine(ask: Ask) -> tuple[int | None, str | None]:
    """Asks for the cores and memory of the machine that will train. Returns None for both if it is this machine."""
    cores = ask(
        "--cores", "Which machine will train? Enter its number of cores, or `this` for this one", "this", _cores
    )
    if cores == "this":
        return None, None
    return int(cores), ask("--memory", "How much memory does it have? E.g. 64GB", "16GB", _bytes)


def _cores(answer: str) -> None:
    if answer != "this" and not (answer.isascii() and answer.isdigit() and 0 < int(answer[:9]) <= MAX_CORES):
        raise typer.BadParameter(f"{answer[:40]} is not a number of cores; enter e.g. 16, or `this`")


def _bytes(memory: str) -> int:
    from sansgpu.planning.memory_options import parse_memory

    return parse_memory(memory)


def _one_of(names: list[str]) -> Callable[[str], None]:
    def check(answer: str) -> None:
        if answer not in names:
            raise typer.BadParameter(f"{answer[:40]} is not one of {', '.join(names)}")

    return check


def _asker(yes: bool) -> Ask:
    """Returns a function that asks a question on the terminal or, with `yes`, returns the default."""
    from sansgpu.config import ConfigError

    def ask(name: str, question: str, default: str, check: Callable[[str], object]) -> str:
        def checked(answer: str) -> str:
            try:
                check(answer.strip())
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from None
            return answer.strip()

        if yes:
            return default
        if not sys.stdin.isatty():
            raise ConfigError(f"init can only ask questions in a terminal; pass {name}, or --yes to use the defaults.")
        answer: str = typer.prompt(question, default=default, value_proc=checked, err=True)
        return answer

    return ask

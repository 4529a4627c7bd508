"""The `sansgpu init` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sansgpu.cli.options import JsonOption, flag, option, preparation_bar, print_json, show, warn

if TYPE_CHECKING:
    from sansgpu.jobs.init import InitAnswers

# Asks a question. Arguments: the flag that answers it, the question, the default, and a check of the answer.
Ask = Callable[[str, str, str, Callable[[str], object]], str]
_ANSWERS = "Answers"
MAX_CORES = 100_000


def init(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to write. Default: sansgpu.yaml.", show_default=False)
    ] = None,
    text: Annotated[
        str | None, option("File, folder or Hub name, or python-stdlib, the built-in text.", _ANSWERS)
    ] = None,
    task: Annotated[str | None, option("Task, e.g. pretrain, sft or classify.", _ANSWERS)] = None,
    model: Annotated[
        str | None, option("Model to fine-tune: run folder, Hugging Face model or GGUF file.", _ANSWERS)
    ] = None,
    hours: Annotated[str | None, option("Time to train, e.g. 2h or 30m.", _ANSWERS, metavar="TIME")] = None,
    cores: Annotated[
        int | None, option("Cores of the machine, if it is not this one.", _ANSWERS, min=1, max=MAX_CORES)
    ] = None,
    memory: Annotated[
        str | None, option("Its memory, e.g. 64GB. Default: this one's.", _ANSWERS, metavar="SIZE")
    ] = None,
    yes: Annotated[bool, flag("Take the default of every answer that is not given.", None, "--yes", "-y")] = False,
    force: Annotated[bool, flag("Replace an existing file.", None, "--force")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask four questions and write a configuration.

    Example: sansgpu init notes.yaml --text notes/ --task pretrain --hours 2h --yes
    """
    from sansgpu.jobs.init import DEFAULT_FILE, require_new

    target = file or DEFAULT_FILE
    require_new(target, force)
    answers = _answers(text, task, model, hours, cores, memory, _asker(yes))
    with preparation_bar() as bar:
        from sansgpu.jobs.init import init as job

        result = job(target, answers, force, bar, warn)
    if as_json:
        print_json(result)
        return
    show(f"{result['summary']}\n\nWritten to {result['file']}. Next:\n")
    show("\n".join(f"  {command}" for command in result["commands"]))


def _answers(
    text: str | None,
    task: str | None,
    model: str | None,
    hours: str | None,
    cores: int | None,
    memory: str | None,
    ask: Ask,
) -> InitAnswers:
    """Asks for each answer that is not given and checks all of them."""
    from sansgpu.config import PYTHON_STDLIB
    from sansgpu.config.tasks import DEFAULT_TASK
    from sansgpu.jobs.init import DEFAULT_HOURS, PURPOSES, InitAnswers, parse_hours, purposes_of
    from sansgpu.jobs.init import require_text as check_text

    if text is None:
        text = ask("--text", f"What text? A file, a folder or a Hub name; {PYTHON_STDLIB} is built in", PYTHON_STDLIB,
                   check_text)  # fmt: skip
    else:
        check_text(text)
    if task is None:
        tasks = purposes_of(text)
        width = max(map(len, tasks))
        lines = "\n".join(f"  {name:<{width}}  {PURPOSES[name].words}; needs {PURPOSES[name].rows}" for name in tasks)
        task = ask("--task", f"What for?\n{lines}\nTask", DEFAULT_TASK, _one_of(tasks))
    base = PURPOSES[task].model if task in PURPOSES else None
    if base and model is None:
        model = ask("--model", "Which model to start from? A folder, a GGUF file or a Hub name", base, lambda _: None)
    if hours is None:
        hours = ask("--hours", "How long? Hours or minutes, e.g. 2h or 30m", DEFAULT_HOURS, parse_hours)
    if cores is None and memory is None:
        cores, memory = _machine(ask)
    return InitAnswers(text, task, parse_hours(hours), model, cores, None if memory is None else _bytes(memory))


def _machine(ask: Ask) -> tuple[int | None, str | None]:
    """Asks for the machine's cores and memory; both are None for this one."""
    cores = ask("--cores", "Which machine? Its number of cores, or `this`", "this", _cores)
    if cores == "this":
        return None, None
    return int(cores), ask("--memory", "How much memory has it? E.g. 64GB", "16GB", _bytes)


def _cores(answer: str) -> None:
    if answer != "this" and not (answer.isascii() and answer.isdigit() and 0 < int(answer[:9]) <= MAX_CORES):
        raise typer.BadParameter(f"{answer[:40]} is not a number of cores; give e.g. 16, or `this`")


def _bytes(memory: str) -> int:
    from sansgpu.planning.memory_options import parse_memory

    return parse_memory(memory)


def _one_of(names: list[str]) -> Callable[[str], None]:
    def check(answer: str) -> None:
        if answer not in names:
            raise typer.BadParameter(f"{answer[:40]} is not one of {', '.join(names)}")

    return check


def _asker(yes: bool) -> Ask:
    """Returns a function that asks on the terminal, or with `yes` takes the default."""
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
            raise ConfigError(
                f"init asks questions in a terminal, but this is none; give {name}, or --yes for defaults."
            )
        answer: str = typer.prompt(question, default=default, value_proc=checked, err=True)
        return answer

    return ask

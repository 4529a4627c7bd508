"""Shared options of the command line, completion of their values, and output helpers."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sansgpu.events.escape import printable, printable_json, printable_line

if TYPE_CHECKING:
    from sansgpu.config.schema import Config
    from sansgpu.views.terminal import PreparationBar, RunConsole

CONFIGURATION, OUTPUT, SAMPLING = "Configuration", "Output", "Sampling"  # groups of options in a command's help
CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
MAX_LINE_LENGTH = 2500  # characters of a message on stderr
MAX_WORD_LENGTH = 400  # the same of a word in it, e.g. a value of thousands of digits
LARGEST_INTEGER = 2**63 - 1  # limit of torch.Generator, NumPy and files
PRESETS = Path(__file__).parents[1] / "config/presets"
MAX_COMPLETED_RUNS = 200


def configuration_names(incomplete: str) -> list[str]:
    """Completes presets, and the files in ./configs by name, in a shell.

    Looks at files only, because importing the schema would take longer than a key press. Without a match, bash, zsh and
    fish complete file names.
    """
    files = [file for folder in (PRESETS, Path("configs")) if folder.is_dir() for file in sorted(folder.iterdir())]
    names = dict.fromkeys(file.stem for file in files if file.suffix in CONFIG_SUFFIXES)
    return [name for name in names if name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    """Returns the run folders in ./runs, the most recently changed first."""
    records = sorted(Path("runs").glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [str(file.parent) for file in records[:MAX_COMPLETED_RUNS] if str(file.parent).startswith(incomplete)]


def snapshot_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns latest, best, and the snapshots of the run that the command line names, the newest first."""
    named = (context.params.get("run"), context.params.get("output_dir"), *context.args)  # args: not parsed yet
    run = next(filter(None, named), None)
    steps = sorted(Path(run).glob("snapshots/step-*"), reverse=True) if run else []
    return [name for name in ("latest", "best", *(step.name for step in steps)) if name.startswith(incomplete)]


def written_path(name: str) -> Path:
    """Parses an output path. Rejects an empty one: from an unset shell variable, it would mean the current folder."""
    if not name.strip():
        raise typer.BadParameter("the name is empty; pass a file or a folder")
    from sansgpu.config.paths import local_path  # imports the schema, which `--help` does not need

    return local_path(name)


def option(help: str, group: str | None = None, *names: str, **more: Any) -> Any:
    """Returns an option that a command's help shows in the box `group`."""
    return typer.Option(*names, help=help, rich_help_panel=group, **more)


def flag(help: str, group: str | None = None, *names: str) -> Any:
    """Returns an option that takes no value."""
    return option(help, group, *names, metavar="")


def number_option(help: str, group: str | None = None, least: float = -math.inf) -> Any:
    """Returns an option that takes a finite number, at least `least`."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise typer.BadParameter(f"{text} is not a finite number")
        if number < least:
            raise typer.BadParameter(f"{text} is less than {least:g}")
        return number

    return option(help, group, parser=parse, metavar="NUMBER")


PRECISIONS = "auto", "fp32", "bf16", "int16", "int8"  # the values of training.precision


def precision_option(auto: str) -> Any:
    """Returns an option for the precision of matrix products; `auto` describes what auto means."""

    def parse(text: str) -> str:
        if text not in PRECISIONS:
            raise typer.BadParameter(f"{text} must be {', '.join(PRECISIONS)}")
        return text

    help = f"Precision of matrix products. int8: usually the fastest, but rounds the most. auto: {auto}"
    return option(help, None, parser=parse, metavar="|".join(PRECISIONS))


def _template_variable(text: str) -> tuple[str, Any]:
    """Parses the name and the value, in YAML, of a variable for the chat template."""
    from sansgpu.config.data import is_template_variable  # imports the schema, which `--help` does not need
    from sansgpu.config.parse import parse_value

    name, equals, value = text.partition("=")
    if not equals or not is_template_variable(name):
        raise typer.BadParameter(f"{text} must be a name and a value, e.g. enable_thinking=false")
    return name, parse_value(value)


def path_option(help: str, metavar: str) -> Any:
    """Returns an option that takes an output path."""
    return option(help, OUTPUT, parser=written_path, metavar=metavar)


RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False, autocompletion=run_names)
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Run folder, Hugging Face model or GGUF file.", autocompletion=run_names)
]
ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG",
        help="Configuration file, preset (small, medium, large) or name of a file in configs/. Default: the built-in "
        "configuration.",
        show_default=False,
        autocompletion=configuration_names,
    ),
]
OverrideOption = Annotated[
    list[str] | None,
    option("Override a configuration key. Repeatable.", CONFIGURATION, "--set", metavar="KEY.PATH=VALUE"),
]
TemplateVariableOption = Annotated[
    list[Any] | None,
    option(
        "Variable for the chat template, e.g. enable_thinking=false. Repeatable. Default: as in training.",
        None,
        "--template-variable",
        parser=_template_variable,
        metavar="NAME=VALUE",
    ),
]
# The type is Any because `parse` returns Precision, whose import takes long.
PrecisionOption = Annotated[
    Any, precision_option("as in training; fp32 for models that are not runs, and for runs in bf16 without bf16 here.")
]
GenerationPrecisionOption = Annotated[Any, precision_option("bf16 if this machine multiplies it, otherwise fp32.")]
SnapshotOption = Annotated[
    str,
    option(
        "Snapshot (checkpoint) to load: final (whose model is in final/), latest, best, a step, or a name from "
        "`sansgpu snapshots list`.",
        autocompletion=snapshot_names,
    ),
]
RemoteCodeOption = Annotated[
    bool, flag("Allow Python code that ships with the model to run.", None, "--trust-remote-code")
]
ObjectiveOption = Annotated[
    str | None,
    option(
        "Python class of the task that the run was trained with. Required to import code from outside sansgpu.",
        metavar="MODULE:CLASS",
    ),
]
JsonOption = Annotated[bool, flag("Print the result as one JSON object.", OUTPUT, "--json")]


def with_fields(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a command whose only argument is a dataclass of options into one that takes each option, as typer needs."""
    (options,) = signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(options.annotation, include_extras=True)

    @wraps(command)
    def with_each_option(**values: Any) -> Any:
        return command(options.annotation(**values))

    with_each_option.__signature__ = signature(command).replace(  # type: ignore[attr-defined]  # read by typer
        parameters=[
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if each.default is MISSING else each.default,
                annotation=hints[each.name],
            )
            for each in fields(options.annotation)
        ]
    )
    return with_each_option


def show(text: object = "", end: str = "\n") -> None:
    """Prints to stdout and flushes. Escapes control characters, because the text may be a model's output."""
    print(printable(str(text)), end=end, flush=True)


def show_json(text: str) -> None:
    print(printable_json(text, sys.stdout.encoding), end="", flush=True)


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object. Infinities and NaN become null, because JSON cannot represent them."""
    from sansgpu.events.event import finite

    show_json(json.dumps(finite(value), allow_nan=False) + "\n")


def write_json_lines(values: Iterable[dict[str, Any]], output: Path | None) -> None:
    """Writes one JSON object per line to stdout or, atomically, to `output`.

    Raises SansGPUError if the file cannot be written.
    """
    from sansgpu.config import SansGPUError
    from sansgpu.files.atomic import atomic_write, write_failures_as

    lines = (json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    if output is None:
        for line in lines:
            show_json(line)
        return
    failures = write_failures_as(SansGPUError, output)
    with failures, atomic_write(output) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def print_result(result: Any, as_json: bool, print_table: Callable[[RunConsole, Any], None]) -> None:
    """Prints a result as JSON, or as a table on the terminal."""
    from sansgpu.views.terminal import RunConsole

    if as_json:
        print_json(result)
    else:
        print_table(RunConsole(), result)


def checked_config(file: Path | None, overrides: Iterable[Any], processes: int = 1) -> tuple[Config, list[str]]:
    """Loads a configuration, with notes for the user.

    Raises ConfigError, before PyTorch is loaded, if it or the columns of its tables cannot be used.
    """
    from sansgpu.tasks.configuration import load_config

    config, notes = load_config(file, [*overrides], processes=processes)
    _require_columns(config)
    return config, notes


def check_tables_for(run: str, data: str) -> None:
    """Raises ConfigError, before PyTorch is loaded, if a run's task cannot use the columns of the tables in `data`."""
    from sansgpu.config.paths import local_path
    from sansgpu.tasks.configuration import load_config

    file = local_path(run) / "config.yaml"
    if file.is_file():
        config, _ = load_config(file, trusted=False)
        _require_columns(config.model_copy(update={"data": config.data.for_dataset(data)}))


def _require_columns(config: Config) -> None:
    """Raises ConfigError if the meaning of the columns of a local table is unclear."""
    if config.settings.rows != "texts" or isinstance(config.data.text_column, int):  # otherwise it is always clear
        from sansgpu.data.forms.form import resolve_columns
        from sansgpu.data.forms.registry import FORMS

        resolve_columns(config.data, FORMS[config.settings.rows])


def preparation_bar(silent: bool = False, importing: str = "loading PyTorch") -> closing[PreparationBar]:
    """Returns a progress bar on stderr for use in a `with` statement that begins with imports."""
    from sansgpu.machine.hub.client import HUB
    from sansgpu.views.terminal import PreparationBar, RunConsole

    HUB.report = warn
    bar = PreparationBar(RunConsole(stderr=True), silent)
    bar(importing, 0, 0)
    return closing(bar)


def complain(message: str) -> None:
    """Prints one line to stderr. Cuts the middle of a long one: its start names the problem, its end the remedy."""
    words = (_cut(word, MAX_WORD_LENGTH, "...") for word in printable_line(message).split(" "))
    print(_cut(" ".join(words), MAX_LINE_LENGTH, " ... "), file=sys.stderr)


def _cut(text: str, most: int, gap: str) -> str:
    """Replaces the middle of a text of more than `most` characters with `gap`."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}{gap}{text[-half:]}"


def warn(message: str) -> None:
    complain(f"warning: {message}")


def suggest(*command: object) -> None:
    """Prints the command to use next, without the program's name, unless a program reads the output."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        complain(f"next: sansgpu {shlex.join(map(str, command))}")


def suggest_export(model: str) -> None:
    """Suggests to export a run; other models are files already."""
    from sansgpu.config.paths import contains_run

    if contains_run(Path(model)):
        suggest("export", model)

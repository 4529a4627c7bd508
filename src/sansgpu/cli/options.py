"""What the commands share: the applications they belong to, and options that mean the same everywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sansgpu.watch.escape import printable, printable_json, printable_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train language models on machines without a GPU.",
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a byte-level BPE tokenizer, or encode text with one.")
snapshots_app = typer.Typer(no_args_is_help=True, help="Look at, check, delete and branch a run's snapshots.")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(snapshots_app, name="snapshots")

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)]
SnapshotOption = Annotated[str, typer.Option(help="latest, best, a step, or a name that `snapshots list` shows.")]
RemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="A file, or small, medium, large; none: the built-in default.")
]
OverrideOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key; repeatable.")
]
LONGEST_LINE = 2500  # characters of a message on stderr
LARGEST_SEED = 2**63 - 1  # the largest seed that torch.Generator accepts


def written_path(name: str) -> Path:
    """The path that an option names to write to. An empty one, often of an unset variable, would be this folder."""
    if not name.strip():
        raise typer.BadParameter("the name is empty; give a file or a folder")
    return Path(name)


CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def show(text: object = "", end: str = "\n") -> None:
    """Write to stdout at once. Control characters are written out: text may come from anybody, a model included."""
    print(printable(str(text)), end=end, flush=True)


def show_json(text: str) -> None:
    """Write lines of JSON to stdout."""
    print(printable_json(text), end="", flush=True)


def print_json(value: dict[str, Any]) -> None:
    """The result of a command, for other programs. A number that is not finite is null, as JSON has none."""
    from sansgpu.watch.events import finite

    show_json(json.dumps(finite(value), allow_nan=False) + "\n")


def complain(message: str) -> None:
    """Write one line to stderr.

    A very long one loses its middle: what is wrong is said at the beginning, and what to do about it at the end.
    """
    line = printable_line(message)
    half = LONGEST_LINE // 2
    print(line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}", file=sys.stderr)


def warn(message: str) -> None:
    """Write a warning to stderr."""
    complain(f"warning: {message}")

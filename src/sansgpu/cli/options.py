"""Typer applications, shared options and output helpers of the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sansgpu.reporting.escape import printable, printable_json, printable_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train language models on machines without a GPU.",
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a byte-level BPE tokenizer, or encode text with one.")
snapshots_app = typer.Typer(no_args_is_help=True, help="List, verify, delete and fork a run's snapshots.")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(snapshots_app, name="snapshots")

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
SnapshotOption = Annotated[
    str, typer.Option(help="Snapshot to use: latest, best, a step, or a name from `snapshots list`.")
]
RemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow Python code that ships with the model to run.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]", help="Configuration file or preset (small, medium, large). Default: built-in configuration."
    ),
]
OverrideOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a configuration key. Repeatable.")
]
MAX_LINE_LENGTH = 2500  # characters of a message on stderr
LARGEST_SEED = 2**63 - 1  # limit of torch.Generator


def written_path(name: str) -> Path:
    """Parses an output path. Rejects an empty one: from an unset shell variable, it would mean the current folder."""
    if not name.strip():
        raise typer.BadParameter("the name is empty; give a file or a folder")
    return Path(name)


CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def show(text: object = "", end: str = "\n") -> None:
    """Prints to stdout and flushes. Escapes control characters, because the text may be a model's output."""
    print(printable(str(text)), end=end, flush=True)


def show_json(text: str) -> None:
    print(printable_json(text), end="", flush=True)


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object. Infinities and NaN become null, because JSON cannot represent them."""
    from sansgpu.reporting.events import finite

    show_json(json.dumps(finite(value), allow_nan=False) + "\n")


def complain(message: str) -> None:
    """Prints one line to stderr. Cuts the middle of a long one: its start names the problem, its end the remedy."""
    line = printable_line(message)
    half = MAX_LINE_LENGTH // 2
    print(line if len(line) <= MAX_LINE_LENGTH else f"{line[:half]} ... {line[-half:]}", file=sys.stderr)


def warn(message: str) -> None:
    complain(f"warning: {message}")

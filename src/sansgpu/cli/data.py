"""The command `sansgpu data`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sansgpu.cli.options import (
    JsonOption,
    OverrideOption,
    complain,
    flag,
    option,
    path_option,
    preparation_bar,
    print_json,
    suggest,
    with_fields,
)

if TYPE_CHECKING:
    from sansgpu.config.schema import Config

_EXAMPLES = "Examples"


@dataclass(frozen=True, kw_only=True)
class _DataOptions:
    data: Annotated[str, typer.Argument(metavar="DATA", help="File, folder or Hub name.", show_default=False)]
    task: Annotated[str | None, option("Task that will train on the data. Default: guessed from the rows.")] = None
    model: Annotated[
        str | None,
        option("Show tokens of this model: Hugging Face model, folder or GGUF file. Default: words, without PyTorch."),
    ] = None
    override: OverrideOption = None
    row: Annotated[int | None, option("Show only this row, counted from 1.", _EXAMPLES, min=1, metavar="N")] = None
    all_rows: Annotated[bool, flag("Show every row, in a pager on a terminal.", _EXAMPLES, "--all")] = False
    report: Annotated[Path | None, path_option("Write an HTML page.", "FILE.html")] = None
    write: Annotated[
        Path | None, path_option("Write the rows in one form, as JSON lines that the same task reads.", "FILE")
    ] = None
    as_json: JsonOption = False


@with_fields
def data(given: _DataOptions) -> None:
    """Show what a dataset contains and what will be learned.

    Counts forms, columns, invalid rows, duplicates, lengths and labels. Never changes the data.

    Example: sansgpu data rows.jsonl --task sft
    """
    if given.row is not None and given.all_rows:
        raise typer.BadParameter("--row and --all exclude each other; remove one of them")
    with preparation_bar(silent=given.as_json, importing="reading rows") as bar:
        from sansgpu.jobs.data import DataRequest, look, write_page

        request = DataRequest(
            given.data, given.task, given.model, tuple(given.override or ()), given.row, given.all_rows, given.write
        )
        found = look(request, bar)
        if given.report is not None:
            write_page(found, given.report)
    if given.as_json:
        print_json(asdict(found))
        return
    from sansgpu.views.data_look import print_look
    from sansgpu.views.terminal import RunConsole

    console = RunConsole()
    is_paged = given.all_rows and console.is_terminal
    with console.pager() if is_paged else nullcontext():
        print_look(console, found, whole=given.all_rows or given.row is not None, in_color=not is_paged)
    for path in (given.report, given.write):
        if path is not None:
            complain(f"written to {path}")
    if given.row is None and not given.all_rows:
        suggest("init", "--text", given.data, "--task", found.task)


def data_lines(config: Config) -> list[str]:
    """Returns lines on the forms, columns and invalid rows of a run's data, unless they are not read from rows."""
    from sansgpu.config import SansGPUError
    from sansgpu.jobs.data import look_briefly
    from sansgpu.views.data_look import look_lines

    try:
        found = look_briefly(config)
    except SansGPUError:  # the run has read its data in another way, e.g. from a teacher's folder
        return []
    return [] if found is None else look_lines(found)

"""The command `sansgpu data`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sansgpu.cli.options import (
    LARGEST_INTEGER,
    JsonOption,
    OverrideOption,
    complain,
    flag,
    option,
    path_option,
    preparation_bar,
    print_json,
    print_result,
    suggest,
    warn,
    with_fields,
)

if TYPE_CHECKING:
    from sansgpu.config.schema import Config
    from sansgpu.views.terminal import RunConsole

_EXAMPLES, _QUESTIONS = "Examples", "Questions about documents"
MAX_QUESTIONS = 100  # about each passage; a passage has no more to ask
_LOOK_ONLY = ("model", "override", "row", "all_rows", "report")  # options without effect on questions


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
    ask: Annotated[
        str | None,
        option(
            "Let this chat model write questions about documents, and answers, as rows for --task qa (the default) or "
            "sft: run, Hugging Face model or GGUF file. Needs --write.",
            _QUESTIONS,
            metavar="MODEL",
        ),
    ] = None
    questions: Annotated[
        int, option("With --ask: questions about each passage.", _QUESTIONS, min=1, max=MAX_QUESTIONS, metavar="N")
    ] = 1
    seed: Annotated[int, option("With --ask: random seed.", _QUESTIONS, min=0, max=LARGEST_INTEGER, metavar="N")] = 0
    as_json: JsonOption = False


@with_fields
def data(given: _DataOptions) -> None:
    """Show what a dataset contains and what will be learned.

    Counts forms, columns, invalid rows, duplicates, lengths and labels. Never changes the data.
    With --ask: writes questions about documents with their answers. Run the command again to continue after an
    interruption.

    Example: sansgpu data rows.jsonl --task sft
    """
    if given.ask is not None:
        _ask(given, given.ask)
        return
    if given.questions != 1 or given.seed:
        raise typer.BadParameter("--questions and --seed require --ask; add it or remove them")
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
        print_look(console, found, in_color=not is_paged)
    for path in (given.report, given.write):
        if path is not None:
            complain(f"written to {path}")
    if given.row is None and not given.all_rows:
        suggest("init", "--text", given.data, "--task", found.task)


def _ask(given: _DataOptions, model: str) -> None:
    """Writes questions about documents."""
    if given.write is None:
        raise typer.BadParameter("--ask needs a file for the questions; add --write FILE.jsonl")
    for name in _LOOK_ONLY:
        if getattr(given, name) not in (None, False):
            flags = {"override": "--set", "all_rows": "--all"}
            raise typer.BadParameter(f"--ask and {flags.get(name, f'--{name}')} exclude each other; remove one of them")
    with preparation_bar(silent=given.as_json) as bar:
        from sansgpu.jobs.data import require_new_file
        from sansgpu.jobs.data.ask import AskRequest, ask
        from sansgpu.train.loading import ModelRequest

        require_new_file(given.write, given.data)
        task = given.task or "qa"
        request = AskRequest(given.data, ModelRequest(model), given.write, task, given.questions, given.seed)
        summary = ask(request, warn, complain, bar)
    print_result(summary, given.as_json, _print_asked)
    suggest("data", given.write, "--task", task)


def _print_asked(console: RunConsole, summary: dict[str, Any]) -> None:
    passages = f"{summary['used_passages']:,} of {summary['passages']:,} passages"
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in summary["left_out"].items())
    line = f"{summary['output']}: {summary['rows']:,} questions about {passages}; left out: {left_out or 'none'}"
    console.print(line, highlight=False, markup=False)


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

"""The `sansgpu extract` command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import SnapshotOption, app, print_json, show_json, warn, written_path


@app.command()
def extract(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run of task graph, or a folder exported from one.")],
    text: Annotated[str | None, typer.Option(help="Text to extract triples from.")] = None,
    data: Annotated[str | None, typer.Option(help="Dataset to read (file, folder or Hub name).")] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="Head to query. Default: the text's entities, or else all its words. Repeatable."),
    ] = None,
    relation: Annotated[
        list[str] | None, typer.Option(help="Relation to query. Default: all relations. Repeatable.")
    ] = None,
    closed: Annotated[
        bool, typer.Option("--closed", help="Choose tails from the text's entities, or else from all training tails.")
    ] = False,
    min_score: Annotated[float | None, typer.Option(help="Minimum score (mean log-probability).")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam width when tails are generated token by token.")] = 10,
    top: Annotated[int, typer.Option(min=1, help="Maximum number of tails per head and relation.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(parser=written_path, metavar="FILE", help="New JSON lines file. Default: stdout."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    as_json: Annotated[
        bool, typer.Option("--json", help="With --output: print counts and scores as one JSON object.")
    ] = False,
) -> None:
    """Extract triples from texts as JSON lines with doc, head, relation, tail and score.

    If the data has triples, precision, recall and F1 are printed to stderr.

    Example: sansgpu extract runs/graph --text "Metformin lowers glucose." --head Metformin
    """
    from contextlib import ExitStack

    from sansgpu.jobs.extract import extract as job
    from sansgpu.reporting.outputs import require_file
    from sansgpu.reporting.tables import print_extraction
    from sansgpu.reporting.terminal import PreparationBar, RunConsole

    if as_json and output is None:
        raise typer.BadParameter("--json requires --output, because stdout carries the triples")
    if output is not None:
        require_file(output)
    errors = RunConsole(stderr=True)
    bar = PreparationBar(errors)
    with ExitStack() as stack:
        stack.callback(bar.close)
        asked, width = (head or (), relation or ()), max(beams, top)
        found = job(run, text, data, *asked, closed, min_score, width, top, snapshot, bar, warn)
        write = stack.enter_context(_writer(output))
        for triple in found:
            write(json.dumps(triple, ensure_ascii=False) + "\n")
    if as_json:
        print_json(found.summary())
    else:
        print_extraction(errors, found.summary())


@contextmanager
def _writer(output: Path | None) -> Iterator[Callable[[str], object]]:
    """Yields a function that writes to `output`, or to stdout. Raises SansGPUError if the file cannot be written."""
    if output is None:
        yield show_json
        return
    from sansgpu.config import SansGPUError

    try:
        with output.open("w", encoding="utf-8") as file:
            yield file.write
    except OSError as error:
        raise SansGPUError(f"{output} cannot be written: {error.strerror}.") from None

"""`sansgpu extract`: triples read from texts."""

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
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of task graph, or a folder exported from one.")],
    text: Annotated[str | None, typer.Option(help="A text to read triples from.")] = None,
    data: Annotated[str | None, typer.Option(help="A source as data.dataset_name, for many texts.")] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="Ask of this; by default of a text's entities, or all its words. Repeatable."),
    ] = None,
    relation: Annotated[
        list[str] | None, typer.Option(help="Ask for this; by default for all relations. Repeatable.")
    ] = None,
    closed: Annotated[
        bool, typer.Option("--closed", help="Choose tails from a text's entities, or from all tails of training.")
    ] = False,
    min_score: Annotated[float | None, typer.Option(help="Leave out what scores less: mean log-probability.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Tails that are followed at once, where they are spelled.")] = 10,
    top: Annotated[int, typer.Option(min=1, help="Tails of each head and relation, the best first.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(parser=written_path, metavar="FILE", help="New file for the triples. Default: stdout."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    as_json: Annotated[
        bool, typer.Option("--json", help="With --output: how it agrees, as one JSON object on stdout.")
    ] = False,
) -> None:
    """Read triples from texts: JSON lines with doc, head, relation, tail and score.

    Where the data has triples of its own, precision, recall and F1 follow on stderr.

    Example: sansgpu extract runs/graph --text "Metformin lowers glucose." --head Metformin
    """
    from contextlib import ExitStack

    from sansgpu.jobs.extract import extract as job
    from sansgpu.watch.outputs import require_file
    from sansgpu.watch.tables import print_extraction
    from sansgpu.watch.terminal import PreparationBar, RunConsole

    if as_json and output is None:
        raise typer.BadParameter("--json needs --output: stdout has the triples")
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
    """Writes lines to a file, or to stdout as they come. Raises SansGPUError where the disk refuses."""
    if output is None:
        yield show_json
        return
    from sansgpu.config import SansGPUError

    try:
        with output.open("w", encoding="utf-8") as file:
            yield file.write
    except OSError as error:
        raise SansGPUError(f"{output} cannot be written: {error.strerror}.") from None

"""The `sansgpu extract` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import (
    OUTPUT,
    ObjectiveOption,
    SnapshotOption,
    flag,
    number_option,
    option,
    path_option,
    preparation_bar,
    print_json,
    warn,
    write_json_lines,
)

_QUERY = "Query"


def extract(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run of task graph, or a folder exported from one.")],
    text: Annotated[str | None, option("Text to extract triples from.")] = None,
    data: Annotated[str | None, option("Dataset to read (file, folder or Hub name).")] = None,
    head: Annotated[
        list[str] | None,
        option("Head to query. Default: the text's entities, or else all its words. Repeatable.", _QUERY),
    ] = None,
    relation: Annotated[
        list[str] | None, option("Relation to query. Default: all relations. Repeatable.", _QUERY)
    ] = None,
    closed: Annotated[
        bool, flag("Choose tails from the text's entities, or else from all training tails.", _QUERY, "--closed")
    ] = False,
    min_score: Annotated[float | None, number_option("Minimum score (mean log-probability).", _QUERY)] = None,
    beams: Annotated[int, option("Beam width when tails are generated token by token.", _QUERY, min=1)] = 10,
    top: Annotated[int, option("Maximum number of tails per head and relation.", _QUERY, min=1)] = 1,
    output: Annotated[Path | None, path_option("New JSON lines file. Default: stdout.", "FILE")] = None,
    snapshot: SnapshotOption = "latest",
    objective: ObjectiveOption = None,
    as_json: Annotated[
        bool, flag("With --output: print counts and scores as one JSON object.", OUTPUT, "--json")
    ] = False,
) -> None:
    """Extract triples of a knowledge graph from texts.

    Prints JSON lines with doc, head, relation, tail and score.
    If the data has triples, prints precision, recall and F1 to stderr.

    Example: sansgpu extract runs/graph --text "Metformin lowers glucose." --head Metformin
    """
    from sansgpu.files.ownership import require_file
    from sansgpu.views.tables import print_extraction
    from sansgpu.views.terminal import RunConsole

    if as_json and output is None:
        raise typer.BadParameter("--json requires --output, because stdout carries the triples")
    if output is not None:
        require_file(output)
    with preparation_bar() as bar:
        from sansgpu.jobs.extract import extract as job

        queries, width = (head or (), relation or ()), max(beams, top)
        triples = job(run, text, data, *queries, closed, min_score, width, top, snapshot, bar, warn, objective)
        write_json_lines(triples, output)
    if as_json:
        print_json(triples.summary())
    else:
        print_extraction(RunConsole(stderr=True), triples.summary())

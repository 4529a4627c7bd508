"""The `sansgpu report` and `runs` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import JsonOption, app, print_json, show, warn, written_path


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            parser=written_path,
            metavar="PATH",
            help="Output file (html) or folder (png, svg). Default: RUN/report.html or RUN/plots.",
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="html|png|svg", help="html: one page. png, svg: one image per plot.")
    ] = "html",
) -> None:
    """Write a self-contained HTML report of a run, or compare several runs.

    Example: sansgpu report runs/default runs/lower-lr --output compared.html
    """
    from sansgpu.jobs.report import report as job

    for path in job(runs, output, form, warn):
        show(path)


@app.command("runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to search.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder, most recently changed first.

    Example: sansgpu runs
    """
    from sansgpu.jobs.runs import list_runs as job

    rows = job(folder)
    if as_json:
        print_json({"runs": rows})
    elif not rows:
        show(f"No runs found in {folder}.")
    else:
        from sansgpu.reporting.run_list import print_runs
        from sansgpu.reporting.terminal import RunConsole

        print_runs(RunConsole(), rows)

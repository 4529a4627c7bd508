"""The commands that show results: `sansgpu runs`, `report` and `snapshots`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import (
    OUTPUT,
    JsonOption,
    RunArgument,
    SnapshotOption,
    flag,
    option,
    path_option,
    print_json,
    run_names,
    show,
    warn,
)

snapshots = typer.Typer(no_args_is_help=True, help="List, verify, delete and fork a run's snapshots.")


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to search.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder, newest first.

    Example: sansgpu runs
    """
    from sansgpu.jobs.runs import list_runs as job

    rows = job(folder)
    if as_json:
        print_json({"runs": [asdict(row) for row in rows]})
    elif not rows:
        show(f"No runs found in {folder}.")
    else:
        from sansgpu.views.results import print_runs
        from sansgpu.views.terminal import RunConsole

        print_runs(RunConsole(), rows)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders.", show_default=False, autocompletion=run_names)
    ],
    output: Annotated[
        Path | None,
        path_option("Output file (html) or folder (png, svg). Default: RUN/report.html or RUN/plots.", "PATH"),
    ] = None,
    form: Annotated[
        str, option("html: one page; png, svg: one image per plot.", OUTPUT, "--format", metavar="html|png|svg")
    ] = "html",
) -> None:
    """Write an HTML report of a run, or compare several.

    Example: sansgpu report runs/default runs/lower-lr --output compared.html
    """
    from sansgpu.jobs.report import report as job

    for path in job(runs, output, form, warn):
        show(path)


@snapshots.command("list")
def snapshots_list(run: RunArgument, as_json: JsonOption = False) -> None:
    """List a run's snapshots, then those of abandoned branches.

    Example: sansgpu snapshots list runs/default
    """
    from sansgpu.config.wording import formatted
    from sansgpu.jobs.snapshots import list_snapshots

    rows = list_snapshots(run)
    if as_json:
        print_json({"snapshots": rows})
        return
    for row in rows:
        name, value = row["main_metric"]["name"], row["main_metric"]["value"]
        result = "not evaluated" if value is None else f"validation {name} {formatted('{:.4f}', value)}"
        marks = "".join(f"  {mark}" for mark in ("best", "torn") if row.get(mark))
        show(f"{row['name']}  {result}  {row['bytes'] / 1e6:.1f} MB  {row.get('content_id', '')[:12]}{marks}")


@snapshots.command("show")
def snapshots_show(run: RunArgument, snapshot: SnapshotOption = "latest", as_json: JsonOption = False) -> None:
    """Show a snapshot's contents except its tensors.

    Example: sansgpu snapshots show runs/default --snapshot best
    """
    import yaml

    from sansgpu.jobs.snapshots import show_snapshot

    shown = show_snapshot(run, snapshot, warn)
    if as_json:
        print_json(shown)
    else:
        show(yaml.safe_dump(shown, sort_keys=False), end="")


@snapshots.command("verify")
def snapshots_verify(run: RunArgument) -> int:
    """Check that no snapshot is incomplete or altered.

    Compares every file with its manifest. Exits with code 1 if a snapshot is damaged.

    Example: sansgpu snapshots verify runs/default
    """
    from sansgpu.jobs.snapshots import verify_snapshots

    results = verify_snapshots(run)
    for name, problem in results:
        show(f"{name}  {problem or 'ok'}")
    return int(any(problem for _, problem in results))


@snapshots.command("prune")
def snapshots_prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None,
        option("Number of newest snapshots to keep in addition to the best one. Default: 1, or all with --abandoned."),
    ] = None,
    abandoned: Annotated[bool, flag("Also delete the snapshots of abandoned branches.", None, "--abandoned")] = False,
) -> None:
    """Delete old snapshots.

    Example: sansgpu snapshots prune runs/default --keep-last 1
    """
    from sansgpu.jobs.snapshots import prune_snapshots

    for name in prune_snapshots(run, 1 if keep_last is None and not abandoned else keep_last, abandoned):
        show(f"deleted {name}")


@snapshots.command("fork")
def snapshots_fork(
    run: RunArgument,
    output_dir: Annotated[Path, path_option("Folder for the new run.", "DIR")],
    snapshot: SnapshotOption = "latest",
) -> None:
    """Copy a snapshot into a new run.

    The new run can be resumed with different settings.

    Example: sansgpu snapshots fork runs/default --output-dir runs/lower-lr
    """
    from sansgpu.jobs.snapshots import fork_snapshot

    forked = fork_snapshot(run, snapshot, output_dir, warn)
    show(f"{forked}; continue with: sansgpu train --resume --output-dir {forked}")

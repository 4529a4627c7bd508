"""The `sansgpu tune` command."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import ConfigArgument, JsonOption, OverrideOption, app, print_json, warn, written_path


class Pruner(str, Enum):
    """Rules that stop trials early."""

    MEDIAN = "median"
    HYPERBAND = "hyperband"
    NONE = "none"


@app.command()
def tune(
    config: ConfigArgument = None,
    override: OverrideOption = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of trials. The first is the unchanged configuration.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Time budget of the search in hours.")] = None,
    space: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML search space. Default: built-in.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trials to run in parallel. They share the cores.")] = 1,
    pruner: Annotated[Pruner, typer.Option(help="Rule that stops unpromising trials early.")] = Pruner.MEDIAN,
    output_dir: Annotated[
        Path | None,
        typer.Option(parser=written_path, metavar="DIR", help="Folder for the search. Default: runs/tune-NAME."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed (training.seed).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the search space and a time estimate.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Search for the hyperparameters with the lowest validation loss.

    The same command resumes a search.

    Example: sansgpu tune configs/cpu_small.yaml --trials 20 --hours 8 --space space.yaml
    """
    from sansgpu.jobs.tune import Interrupted, TuneRequest
    from sansgpu.jobs.tune import tune as job
    from sansgpu.reporting.terminal import PreparationBar, RunConsole
    from sansgpu.reporting.tune_terminal import TuneTerminal, print_estimate, print_tune

    overrides = (*(override or ()), *([] if seed is None else [f"training.seed={seed}"]))
    request = TuneRequest(config, overrides, space, trials, hours, workers, pruner.value, output_dir, dry_run)
    console = RunConsole(stderr=as_json)
    bar, terminal = PreparationBar(RunConsole(stderr=True)), TuneTerminal(console)

    def show(event: dict[str, object]) -> None:
        bar.close()
        terminal(event)

    try:
        result = job(request, bar, show, warn)
    finally:
        bar.close()
        terminal.close()
    if isinstance(result, Interrupted):
        console.print(f"interrupted and saved; the same command resumes {result.folder}", soft_wrap=True)
        return 128 + result.signal
    if as_json:
        print_json(result)
    elif dry_run:
        print_estimate(console, result)
    else:
        print_tune(console, result)
    return 0

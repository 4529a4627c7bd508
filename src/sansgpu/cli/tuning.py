"""`sansgpu tune`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import ConfigArgument, JsonOption, OverrideOption, app, print_json, warn, written_path


class Pruner(str, Enum):
    """What ends trials early."""

    MEDIAN = "median"
    HYPERBAND = "hyperband"
    NONE = "none"


@app.command()
def tune(
    config: ConfigArgument = None,
    override: OverrideOption = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Runs to compare, the configuration as it is first.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Time this search may take.")] = None,
    space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What is searched, as YAML; by default what usually pays.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trials at a time, which share the cores.")] = 1,
    pruner: Annotated[Pruner, typer.Option(help="What ends trials that promise little.")] = Pruner.MEDIAN,
    output_dir: Annotated[
        Path | None,
        typer.Option(parser=written_path, metavar="DIR", help="The search's folder. Default: runs/tune-NAME."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The source of all randomness, as training.seed.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="What is searched and how long it takes.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Search for the values with which a configuration learns best; the same command goes on with a search.

    Example: sansgpu tune configs/cpu_small.yaml --trials 20 --hours 8 --space space.yaml
    """
    from sansgpu.jobs.tune import Interrupted, TuneRequest
    from sansgpu.jobs.tune import tune as job
    from sansgpu.watch.terminal import PreparationBar, RunConsole
    from sansgpu.watch.tune_terminal import TuneTerminal, print_estimate, print_tune

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
        console.print(f"interrupted and saved; the same command goes on with {result.folder}", soft_wrap=True)
        return 128 + result.signal
    if as_json:
        print_json(result)
    elif dry_run:
        print_estimate(console, result)
    else:
        print_tune(console, result)
    return 0

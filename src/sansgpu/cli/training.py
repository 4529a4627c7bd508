"""The `sansgpu train` command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sansgpu.cli.options import OverrideOption, RemoteCodeOption, app, show, written_path


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="Configuration (YAML, TOML or JSON). Default: the built-in one."),
    ] = None,
    config_option: Annotated[
        Path | None, typer.Option("-f", "--config", metavar="FILE", help="Same as CONFIG.")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "--output_dir", parser=written_path, metavar="DIR", help="Run folder."),
    ] = None,
    override: OverrideOption = None,
    resume: Annotated[str | None, typer.Option(metavar="[latest|SNAPSHOT]", help="Resume from a snapshot.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Maximum number of optimizer updates.")] = None,
    batch_size: Annotated[str | None, typer.Option(metavar="N|auto", help="Examples per micro-batch.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Context length in tokens, for the model and the data.")] = None,
    target_device: Annotated[str | None, typer.Option(metavar="cpu|gpu|auto", help="Device to train on.")] = None,
    prefetch: Annotated[int | None, typer.Option(min=0, help="Number of batches to prepare ahead.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Print only JSON lines on stdout.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines instead of the live view.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prepare the run and show it, without training.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse to resume if the result could differ.")] = False,
    until: Annotated[str | None, typer.Option(metavar="HH:MM", help="Finish and save by this time of day.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if the memory estimate says the run will not fit.")
    ] = False,
    trust_remote_code: RemoteCodeOption = False,
    objective: Annotated[str | None, typer.Option(metavar="MODULE:CLASS", help="Python class of the task.")] = None,
    processes: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Processes to start on this machine. auto: one per NUMA node or socket."),
    ] = None,
) -> int:
    """Train a model from a configuration.

    Example: sansgpu train configs/cpu_small.yaml --set data.dataset_name=notes/ --max-steps 200
    """
    started = time.monotonic()
    if config and config_option:
        raise typer.BadParameter("the configuration is given twice, as CONFIG and with --config")
    devices = {"cpu": "cpu", "gpu": "cuda", "auto": "auto", None: None}
    if target_device not in devices:
        raise typer.BadParameter(f"--target-device is {target_device}, but must be cpu, gpu or auto")
    flags = {
        "training.max_steps": max_steps,
        "training.batch_size": batch_size,
        "model.max_seq_len": seq_len,
        "data.max_length": seq_len,
        "device": devices[target_device],
        "training.dataloader_num_workers": None if prefetch is None else min(prefetch, 1),
        "training.dataloader_prefetch_factor": prefetch or None,
        "training.seed": seed,
        "training.until": until,
        "objective": objective,
        "model.trust_remote_code": "true" if trust_remote_code else None,
    }
    overrides = [*(override or []), *(f"{key}={value}" for key, value in flags.items() if value is not None)]

    from sansgpu.jobs.train import TrainRequest
    from sansgpu.jobs.train import train as job
    from sansgpu.machine.world import find_world
    from sansgpu.reporting.events import Sink
    from sansgpu.reporting.jsonl import JsonLines
    from sansgpu.reporting.terminal import PreparationBar, RunConsole, Terminal, Warnings
    from sansgpu.train.loop import TrainingResult

    world = find_world()
    if processes is not None:
        from sansgpu.machine.processes import launch
        from sansgpu.machine.processes import processes as number_of

        if world.launcher:
            raise typer.BadParameter(
                f"--processes starts its own processes, but {world.launcher} has started this one; leave it out"
            )
        if (number := number_of(processes)) > 1:
            return launch(number, _without(sys.argv[1:], "--processes"))
    console, errors = RunConsole(), RunConsole(stderr=True)
    request = TrainRequest(
        config_file=config or config_option,
        overrides=tuple(overrides),
        output_dir=output_dir,
        resume=resume,
        strict=strict,
        dry_run=dry_run,
        force=force,
        world=world,
        started=started,
    )
    sink: Sink = Terminal(errors if dry_run else console)
    if world.rank:
        sink = Warnings(errors, world.rank)
    elif headless:
        sink = JsonLines(sys.stdout)
    elif sys.stdout.isatty() and not (plain or dry_run or console.is_dumb_terminal):
        from sansgpu.reporting.live import LiveView

        sink = LiveView(console, request.controls, request.monitor.latest)
    bar = PreparationBar(errors, silent=world.rank > 0)
    try:
        outcome = job(request, [bar, sink], bar)
    finally:
        bar.close()
        sink.close()
    if isinstance(outcome, TrainingResult):
        return 128 + outcome.signal if outcome.signal else 0
    if not world.rank:
        _print_dry_run(outcome)
    return 0


def _without(arguments: list[str], option: str) -> list[str]:
    """Removes an option and its value from the arguments."""
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(f"{option}="):
            skip = argument == option
            remaining += [] if skip else [argument]
        else:
            skip = False
    return remaining


def _print_dry_run(result: Any) -> None:
    import dataclasses

    import yaml

    from sansgpu.config import acting_values

    prepared = result.prepared
    environment = dataclasses.asdict(prepared.environment)
    sections = {"output_dir": str(result.paths.root), "environment": environment, "run": prepared.facts()}
    show(yaml.safe_dump({"config": acting_values(prepared.config), **sections}, sort_keys=False), end="")
    if (preview := prepared.corpus.preview()) is not None:
        show("# First training example. Tokens that count toward the loss are between ⟦ and ⟧:")
        show("".join(f"# {line}\n" for line in preview.splitlines()), end="")

"""The commands that measure and estimate before a run: `sansgpu plan`, `bench` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sansgpu.cli.options import ConfigArgument, JsonOption, OverrideOption, app, print_json, warn, written_path


@app.command()
def plan(
    config: ConfigArgument = None,
    override: OverrideOption = None,
    presets: Annotated[bool, typer.Option("--presets", help="Compare the presets small, medium and large.")] = False,
    hours: Annotated[float | None, typer.Option(help="Propose the best configuration for this many hours.")] = None,
    data: Annotated[str | None, typer.Option(help="With --hours: dataset (file, folder or Hub name).")] = None,
    output: Annotated[
        Path | None,
        typer.Option(parser=written_path, metavar="FILE", help="With --hours: output file. Default: proposed.yaml."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Also estimate the run on this many machines.")] = None,
    network: Annotated[
        str | None, typer.Option(metavar="RATE", help="Network bandwidth between nodes, e.g. 100mbit. Default: 10gbps.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="One-way network latency, e.g. 0.1ms. Default: 50us.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price per node and hour.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory and time of a run without training.

    Example: sansgpu plan configs/cpu_small.yaml --set data.dataset_name=notes/ --nodes 4 --network 10gbps
    """
    from sansgpu.config import ConfigError
    from sansgpu.jobs.plan import plan as job
    from sansgpu.jobs.plan import plan_presets
    from sansgpu.planning.cluster import cluster_of
    from sansgpu.planning.propose import propose
    from sansgpu.reporting.plan_table import print_plan, print_presets
    from sansgpu.reporting.terminal import PreparationBar, RunConsole

    if presets and (config or hours is not None):
        raise ConfigError("--presets compares small, medium and large; leave out the configuration and --hours.")
    if hours is not None and config:
        raise ConfigError(f"--hours proposes a configuration of its own; leave out {config} and give --data.")
    if hours is None and (data or output):
        raise ConfigError("--data and --output require --hours; to plan for other data, --set data.dataset_name=PATH.")
    if nodes is not None and (presets or hours is not None):
        raise ConfigError("--nodes plans a single configuration; leave out --presets and --hours.")
    if nodes is None and (network is not None or latency is not None or price is not None):
        raise ConfigError("--network, --latency and --price require --nodes.")
    cluster = None if nodes is None else cluster_of(nodes, network or "10gbps", latency or "50us", price)
    bar = PreparationBar(RunConsole(stderr=True))
    result: Any
    try:
        if presets:
            result = {"presets": plan_presets(override or [], warn)}
        elif hours is not None:
            file = output or Path("proposed.yaml")
            result = propose(hours, data or "python-stdlib", override or [], file, bar, warn, bar.show_message)
        else:
            result = job(config, override or [], bar, warn, cluster)
    finally:
        bar.close()
    if as_json:
        print_json(result)
    elif presets:
        print_presets(RunConsole(), result["presets"])
    else:
        print_plan(RunConsole(), result)


@app.command()
def bench(
    config: ConfigArgument = None,
    override: OverrideOption = None,
    steps: Annotated[int, typer.Option(min=2, help="Number of steps to time.")] = 20,
    output_dir: Annotated[
        Path | None,
        typer.Option(parser=written_path, metavar="DIR", help="Folder for the report. Default: bench/NAME."),
    ] = None,
    from_step: Annotated[int, typer.Option(min=0, help="Also project the time of a run resumed at this step.")] = 0,
    what_if: Annotated[bool, typer.Option(help="Also measure variations of the configuration.")] = True,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Time only forward passes, without data.")
    ] = False,
    gpu_tflops: Annotated[
        float | None, typer.Option(help="Compare with the estimated speed of a GPU with this many TFLOP/s.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Benchmark a configuration and write report.md, report.html, optimized.yaml and start.sh.

    Example: sansgpu bench configs/cpu_small.yaml --set data.dataset_name=notes/ --steps 20
    """
    from sansgpu.jobs.bench import BenchRequest
    from sansgpu.jobs.bench import bench as job
    from sansgpu.reporting.bench_table import print_bench, print_forward
    from sansgpu.reporting.terminal import PreparationBar, RunConsole

    bar = PreparationBar(RunConsole(stderr=True))
    folder = output_dir or Path("bench") / (config.stem if config else "default")
    request = BenchRequest(
        config, tuple(override or ()), folder, steps, from_step, what_if, forward_only,
        gpu_tflops * 1e12 if gpu_tflops else None,
    )  # fmt: skip

    try:
        result: Any = job(request, bar, warn, bar.show_message)
    finally:
        bar.close()
    if as_json:
        print_json(result)
    elif forward_only:
        print_forward(RunConsole(), result)
    else:
        print_bench(RunConsole(), result)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Show this machine's hardware and measured speed, with advice to make it faster.

    Example: sansgpu doctor
    """
    from sansgpu.jobs.doctor import doctor as job
    from sansgpu.reporting.tables import print_doctor
    from sansgpu.reporting.terminal import RunConsole

    result = job()
    if as_json:
        print_json(result)
    else:
        print_doctor(RunConsole(), result)

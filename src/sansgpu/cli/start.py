"""The commands to start with: `sansgpu doctor`, `plan` and `bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sansgpu.cli.options import (
    CONFIGURATION,
    ConfigArgument,
    JsonOption,
    OverrideOption,
    check_tables,
    flag,
    number_option,
    option,
    path_option,
    preparation_bar,
    print_result,
    warn,
)

_PROPOSAL, _CLUSTER, _MEASUREMENT = "Proposal", "Cluster", "Measurement"
_HoursOption = Annotated[float | None, number_option("Propose the best configuration for this many hours.", _PROPOSAL)]


def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine can do and how to speed it up.

    Example: sansgpu doctor
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.doctor import doctor as job
        from sansgpu.views.tables import print_doctor

        report = job(bar)
    print_result(asdict(report), as_json, print_doctor)


def plan(
    config: ConfigArgument = None,
    override: OverrideOption = None,
    presets: Annotated[
        bool, flag("Compare memory and time of small, medium and large by processor.", CONFIGURATION, "--presets")
    ] = False,
    memory: Annotated[
        str | None,
        option(
            "List what can be trained of CONFIG, here also a model folder, GGUF file or Hub name, in this much memory, "
            "e.g. 8GB.",
            CONFIGURATION,
            metavar="SIZE",
        ),
    ] = None,
    hours: _HoursOption = None,
    data: Annotated[str | None, option("With --hours: dataset (file, folder or Hub name).", _PROPOSAL)] = None,
    output: Annotated[
        Path | None, path_option("With --hours: configuration file to write. Default: proposed.yaml.", "FILE")
    ] = None,
    nodes: Annotated[int | None, option("Also estimate the run on this many machines.", _CLUSTER, min=1)] = None,
    network: Annotated[
        str | None, option("Bandwidth between nodes, e.g. 100mbit. Default: 10gbps.", _CLUSTER, metavar="RATE")
    ] = None,
    latency: Annotated[
        str | None, option("One-way network latency, e.g. 0.1ms. Default: 50us.", _CLUSTER, metavar="TIME")
    ] = None,
    price: Annotated[float | None, number_option("Price per node and hour.", _CLUSTER, least=0)] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate memory and time of a run without training.

    Example: sansgpu plan configs/cpu_small.yaml --set data.dataset_name=notes/ --nodes 4 --network 10gbps
    """
    from sansgpu.config import ConfigError

    if memory is not None:
        if config is None or presets or hours is not None or nodes is not None or override:
            raise ConfigError("--memory needs a model or a configuration, and no other option than --json.")
        _show_memory_options(str(config), memory, as_json)
        return
    _require_consistent(config, presets, hours, bool(data or output), nodes, (network, latency, price) != (None,) * 3)
    if presets:
        _show_presets(override or [], as_json)
        return
    if hours is None:
        check_tables(config, override or [])
    result: Any
    with preparation_bar() as bar:
        from sansgpu.jobs.plan import plan as job
        from sansgpu.planning.cluster import cluster_of
        from sansgpu.planning.propose import propose
        from sansgpu.views.plan_table import print_plan

        cluster = None if nodes is None else cluster_of(nodes, network or "10gbps", latency or "50us", price)
        if hours is not None:
            result = propose(hours, data or "python-stdlib", override or [], output or Path("proposed.yaml"), bar, warn)
        else:
            result = job(config, override or [], bar, warn, cluster)
    print_result(result, as_json, print_plan)


def _require_consistent(
    config: Path | None, presets: bool, hours: float | None, of_hours: bool, nodes: int | None, of_nodes: bool
) -> None:
    """Raises ConfigError for options of `plan` that do not go together."""
    from sansgpu.config import ConfigError

    if presets and (config or hours is not None):
        raise ConfigError("--presets compares small, medium and large; leave out the configuration and --hours.")
    if hours is not None and config:
        raise ConfigError(f"--hours proposes a configuration of its own; leave out {config} and give --data.")
    if hours is None and of_hours:
        raise ConfigError("--data and --output require --hours; to plan for other data, --set data.dataset_name=PATH.")
    if nodes is not None and (presets or hours is not None):
        raise ConfigError("--nodes plans a single configuration; leave out --presets and --hours.")
    if nodes is None and of_nodes:
        raise ConfigError("--network, --latency and --price require --nodes.")


def _show_memory_options(model: str, memory: str, as_json: bool) -> None:
    with preparation_bar() as bar:
        from sansgpu.planning.memory_options import memory_options
        from sansgpu.views.memory_table import print_memory_options

        bar("estimating memory", 0, 0)
        result = memory_options(model, memory)
    print_result(result, as_json, print_memory_options)


def _show_presets(overrides: list[str], as_json: bool) -> None:
    with preparation_bar() as bar:
        from sansgpu.planning.presets import compare_presets
        from sansgpu.views.presets_table import print_presets

        bar.show_message("estimating the presets; timing matrix products")
        rows = compare_presets(overrides)
    print_result({"presets": rows}, as_json, lambda console, _: print_presets(console, rows))


def bench(
    config: ConfigArgument = None,
    override: OverrideOption = None,
    steps: Annotated[int, option("Number of steps to time.", _MEASUREMENT, min=2)] = 20,
    output_dir: Annotated[Path | None, path_option("Folder for the report. Default: bench/NAME.", "DIR")] = None,
    from_step: Annotated[int, option("Also project the time of a run resumed here.", _MEASUREMENT, min=0)] = 0,
    targets: Annotated[
        str | None, option("Steps to project. Default: 100 to 100,000.", _MEASUREMENT, metavar="N,N,...")
    ] = None,
    start: Annotated[
        str | None, option("When projected runs start, e.g. 18:00 or 6PM. Default: now.", _MEASUREMENT, metavar="TIME")
    ] = None,
    what_if: Annotated[
        bool | None,
        flag("Also measure all usual variations, or none. Default: those that take two minutes.", _MEASUREMENT),
    ] = None,
    vary: Annotated[
        list[str] | None,
        option(
            "Also measure other values of a key, e.g. model.n_layers=4,8. Repeatable.",
            _MEASUREMENT,
            metavar="KEY.PATH=VALUE,...",
        ),
    ] = None,
    forward_only: Annotated[
        bool, flag("Time only forward passes, without data.", _MEASUREMENT, "--forward-only")
    ] = False,
    gpu_tflops: Annotated[
        float | None, number_option("Compare with a GPU of this many TFLOP/s (an estimate).", _MEASUREMENT, least=0)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure training speed and find faster settings.

    Writes report.md, report.html, optimized.yaml and start.sh.

    Example: sansgpu bench configs/cpu_small.yaml --set data.dataset_name=notes/ --vary training.threads=1,2
    """
    if forward_only and (vary or targets or start):
        raise typer.BadParameter("--vary, --targets and --start need training steps; leave out --forward-only")
    check_tables(config, override or [])
    folder = output_dir or Path("bench") / (config.stem if config else "default")
    with preparation_bar() as bar:
        from sansgpu.jobs.bench import BenchRequest
        from sansgpu.jobs.bench import bench as job
        from sansgpu.planning.forecast import start_time, target_steps
        from sansgpu.views.bench_table import print_bench, print_forward

        request = BenchRequest(
            config, tuple(override or ()), folder, steps, from_step,
            targets=target_steps(targets) if targets else (),
            start=start_time(start) if start else None,
            what_if=what_if,
            vary=tuple(vary or ()),
            forward_only=forward_only,
            gpu_flops_per_second=gpu_tflops * 1e12 if gpu_tflops else None,
        )  # fmt: skip
        result: Any = job(request, bar, warn)
    print_result(result, as_json, print_forward if forward_only else print_bench)

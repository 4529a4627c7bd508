"""The command `sansgpu plan`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from sansgpu.cli.options import (
    CONFIGURATION,
    ConfigArgument,
    JsonOption,
    OverrideOption,
    checked_config,
    flag,
    number_option,
    option,
    path_option,
    preparation_bar,
    print_result,
    suggest,
    warn,
    with_fields,
)

_PROPOSAL, _CLUSTER, _LIMITS = "Proposal", "Cluster", "What can be trained"


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    config: ConfigArgument = None
    override: OverrideOption = None
    presets: Annotated[
        bool,
        flag(
            "Compare memory and time of the presets small, medium and large on several processors.",
            CONFIGURATION,
            "--presets",
        ),
    ] = False
    memory: Annotated[
        str | None,
        option(
            "Show what can be trained in this much memory, e.g. 8GB: the presets, or the ways to fine-tune CONFIG, "
            "which may also be a model folder, GGUF file or Hub name.",
            _LIMITS,
            metavar="SIZE",
        ),
    ] = None
    until: Annotated[
        str | None,
        option("Without CONFIG: show what can be trained until this time, e.g. 07:00.", _LIMITS, metavar="HH:MM"),
    ] = None
    context: Annotated[
        int | None,
        option("Tokens per example of what is shown. Default: the usual lengths.", _LIMITS, metavar="N", min=2),
    ] = None
    hours: Annotated[
        float | None,
        number_option(
            "Propose the best configuration for a run of this many hours; with --memory, show what can be trained in "
            "them.",
            _PROPOSAL,
        ),
    ] = None
    data: Annotated[str | None, option("With --hours: dataset (file, folder or Hub name).", _PROPOSAL)] = None
    output: Annotated[
        Path | None, path_option("With --hours: configuration file to write. Default: proposed.yaml.", "FILE")
    ] = None
    nodes: Annotated[int | None, option("Also estimate the run on this many nodes.", _CLUSTER, min=1)] = None
    network: Annotated[
        str | None, option("Bandwidth between nodes, e.g. 100mbit. Default: 10gbps.", _CLUSTER, metavar="RATE")
    ] = None
    latency: Annotated[
        str | None, option("One-way network latency, e.g. 0.1ms. Default: 50us.", _CLUSTER, metavar="TIME")
    ] = None
    price: Annotated[float | None, number_option("Price of one node per hour, in any currency.", _CLUSTER, least=0)] = (
        None
    )
    as_json: JsonOption = False


@with_fields
def plan(given: _PlanOptions) -> None:
    """Estimate memory and time of a run without training.

    Example: sansgpu plan configs/cpu_small.yaml --set data.dataset_name=notes/ --nodes 4 --network 10gbps
    """
    if (given.memory, given.until, given.context) != (None,) * 3:
        _show_what_fits(given)
        return
    _require_consistent(given)
    if given.presets:
        _show_presets(given.override or [], given.as_json)
        return
    if given.hours is None:
        checked_config(given.config, given.override or [])
    result: Any
    with preparation_bar() as bar:
        from sansgpu.jobs.plan import plan as job
        from sansgpu.planning.cluster import cluster_of
        from sansgpu.planning.propose import propose
        from sansgpu.views.plan_table import print_plan

        overrides = given.override or []
        if given.hours is not None:
            file = given.output or Path("proposed.yaml")
            result = propose(given.hours, given.data or "python-stdlib", overrides, file, bar, warn)
        else:
            cluster = None
            if given.nodes is not None:
                cluster = cluster_of(given.nodes, given.network or "10gbps", given.latency or "50us", given.price)
            result = job(given.config, overrides, bar, warn, cluster)
    print_result(result, given.as_json, print_plan)
    if given.hours is None and not given.as_json:
        same = (part for text in given.override or [] for part in ("--set", text))
        suggest("train", *([given.config] if given.config else []), *same)


def _require_consistent(given: _PlanOptions) -> None:
    """Raises ConfigError for options of `plan` that do not go together."""
    from sansgpu.config import ConfigError

    if given.presets and (given.config or given.hours is not None):
        raise ConfigError("--presets compares small, medium and large; remove the configuration and --hours.")
    if given.hours is not None and given.config:
        raise ConfigError(f"--hours proposes a new configuration; replace {given.config} with --data.")
    if given.hours is None and (given.data or given.output):
        raise ConfigError(
            "--data and --output require --hours; to plan with different data, use --set data.dataset_name=PATH."
        )
    if given.nodes is not None and (given.presets or given.hours is not None):
        raise ConfigError("--nodes plans a single configuration; remove --presets and --hours.")
    if given.nodes is None and (given.network, given.latency, given.price) != (None,) * 3:
        raise ConfigError("--network, --latency and --price require --nodes; add it.")


def _show_what_fits(given: _PlanOptions) -> None:
    """Shows the ways to train a given model, or the presets, in a given memory and time. Raises ConfigError."""
    from sansgpu.config import ConfigError
    from sansgpu.config.training import require_hours

    others = (given.override, given.data, given.output, given.nodes, given.network, given.latency, given.price)
    if given.presets or any(value is not None for value in others):
        raise ConfigError(
            "--memory, --until and --context can be combined only with --hours and --json; remove the rest."
        )
    if given.config is not None and (given.memory is None or given.until or given.hours is not None):
        raise ConfigError(
            f"with {given.config}, --memory goes together only with --context and --json; to plan a run until "
            "a time or with other lengths, use --set training.until=HH:MM or --set data.max_length=N."
        )
    if given.hours is not None and given.until is not None:
        raise ConfigError("--hours and --until both limit the time; remove one of them.")
    if given.hours is not None:
        require_hours(given.hours)
    seconds = _seconds_until(given.until) if given.until else None if given.hours is None else 3600 * given.hours
    result: Any
    with preparation_bar() as bar:
        from sansgpu.planning.memory_options import memory_options, parse_memory
        from sansgpu.planning.presets import presets_that_fit
        from sansgpu.views.tables import print_fitting_presets, print_memory_options

        bar("estimating memory", 0, 0)
        if given.config is not None and given.memory is not None:
            result = memory_options(str(given.config), given.memory, given.context)
        else:
            memory = None if given.memory is None else parse_memory(given.memory)
            result = presets_that_fit(memory, seconds, given.context)
    print_result(result, given.as_json, print_fitting_presets if given.config is None else print_memory_options)


def _seconds_until(time: str) -> float:
    """Returns the seconds until a time of day or a date and time. Raises ConfigError."""
    from sansgpu.config import ConfigError
    from sansgpu.config.parse import finish_time, normal_time

    try:
        finish = finish_time(normal_time(time), datetime.now())
    except ValueError as error:
        raise ConfigError(f"--until: {error}.") from None
    return (finish - datetime.now()).total_seconds()


def _show_presets(overrides: list[str], as_json: bool) -> None:
    with preparation_bar() as bar:
        from sansgpu.planning.presets import compare_presets
        from sansgpu.views.tables import print_presets

        bar.show_message("estimating the presets; timing matrix products")
        rows = compare_presets(overrides)
    print_result({"presets": rows}, as_json, lambda console, _: print_presets(console, rows))

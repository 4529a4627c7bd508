"""Estimates a run's memory and time before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.planning.cluster import Cluster, plan_nodes, require_examples
from sansgpu.planning.forecast import describe_plan
from sansgpu.planning.resolve import PLAN, resolve_run
from sansgpu.planning.results import RunPlan
from sansgpu.tasks.configuration import load_config
from sansgpu.train.schedule import UNKNOWN_STEPS


def plan(
    file: Path | None, overrides: Sequence[str], progress: ReportProgress, warn: Warn, cluster: Cluster | None = None
) -> RunPlan:
    """Returns the plan that `plan --json` prints, including one for `cluster` if it is given. Raises ConfigError."""
    config, notes = load_config(file, overrides, processes=cluster.nodes if cluster else 1)
    for note in notes:
        warn(note)
    if cluster:
        require_examples(cluster.nodes, config)
    run = resolve_run(config, progress, warn, PLAN)
    if cluster and run.total_steps == UNKNOWN_STEPS and not config.training.time_limited:
        raise ConfigError(
            "--nodes needs the length of the run, but the length of an epoch is unknown; set training.max_steps."
        )
    result = describe_plan(run, progress)
    if cluster:
        result["cluster"] = plan_nodes(run, cluster, progress)
    return result

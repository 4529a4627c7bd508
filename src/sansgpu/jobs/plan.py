"""Estimates a run's memory and time before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sansgpu.config import ConfigError, load_config
from sansgpu.data.shards import ReportProgress
from sansgpu.planning.cluster import Cluster, plan_nodes, require_examples
from sansgpu.planning.estimate import plan_prepared
from sansgpu.planning.prepare import prepare
from sansgpu.planning.set_up import Warn
from sansgpu.train.schedule import UNKNOWN_STEPS
from sansgpu.views.plan_table import RunPlan


def plan(
    file: Path | None, overrides: Sequence[str], progress: ReportProgress, warn: Warn, cluster: Cluster | None = None
) -> RunPlan:
    """Returns the plan that `plan --json` prints, including one for `cluster` if it is given. Raises ConfigError."""
    config, notes = load_config(file, overrides)
    for note in notes:
        warn(note)
    if cluster:
        require_examples(cluster.nodes, config)
    prepared = prepare(config, None, progress, warn, "report", data="wanted", timed="always")
    if cluster and prepared.total_steps == UNKNOWN_STEPS and not config.training.time_limited:
        raise ConfigError("--nodes compares whole runs, but the length of an epoch is unknown; set training.max_steps.")
    result = plan_prepared(prepared, progress)
    if cluster:
        result["cluster"] = plan_nodes(prepared, cluster, progress)
    return result

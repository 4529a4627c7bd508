"""Estimates a run's memory and time before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sansgpu.config import PRESETS, ConfigError, change_config, load_config
from sansgpu.data.shards import ReportProgress
from sansgpu.planning.cluster import Cluster, plan_nodes, require_examples
from sansgpu.planning.estimate import plan_prepared
from sansgpu.planning.prepare import ignore_message, prepare
from sansgpu.planning.set_up import Warn
from sansgpu.reporting.plan_table import PresetPlan, RunPlan
from sansgpu.tasks import task_of
from sansgpu.train.schedule import UNKNOWN_STEPS

OPTIMAL_TOKENS = 20  # compute-optimal training tokens per parameter (Hoffmann et al., arXiv 2203.15556)


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
    result = plan_prepared(prepared)
    if cluster:
        result["cluster"] = plan_nodes(prepared, cluster)
    return result


def plan_presets(overrides: Sequence[str], warn: Warn) -> list[PresetPlan]:
    rows: list[PresetPlan] = []
    for name in PRESETS:
        config, _ = load_config(Path(name), [*overrides, "training.max_steps=1000000"])
        task = task_of(config)
        prepared = prepare(
            task.with_vocabulary(config), None, ignore_message, warn, "report", data="unread", timed="always"
        )
        planned = plan_prepared(prepared, suggest_changes=False)
        frugal = change_config(prepared.config, ["model.gradient_checkpointing=true"])
        smallest = replace(prepared.execution, micro_batch=1)
        tokens, speed = OPTIMAL_TOKENS * planned["parameters"], planned["tokens_per_second"]
        rows.append(
            PresetPlan(
                preset=name,
                **planned,
                least_memory_bytes=task.costs(frugal).memory(smallest).least,
                optimal_tokens=tokens,
                optimal_seconds=tokens / speed if speed else None,
            )
        )
    return rows

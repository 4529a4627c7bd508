"""Estimates a run's memory and time before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sansgpu.config import PRESETS, ConfigError, change_config, load_config
from sansgpu.data.shards import ReportProgress
from sansgpu.machine.cached_measurement import cached_measurement
from sansgpu.machine.probe import isa, total_memory
from sansgpu.machine.roofline import Roofline, measure_roofline
from sansgpu.planning.cluster import Cluster, plan_nodes, require_examples
from sansgpu.planning.forecast import execution, forecast_of, length_of
from sansgpu.planning.memory_fit import changes_that_fit
from sansgpu.planning.prepare import Prepared, Warn, ignore_message, prepare
from sansgpu.tasks import task_of
from sansgpu.train.forecast import done_at
from sansgpu.train.schedule import UNKNOWN_STEPS

Result = dict[str, Any]

ROOFLINE_TOKENS = 4096  # maximum rows of timed matrix products
OPTIMAL_TOKENS = 20  # compute-optimal training tokens per parameter (Hoffmann et al., arXiv 2203.15556)


def plan(
    file: Path | None, overrides: Sequence[str], progress: ReportProgress, warn: Warn, cluster: Cluster | None = None
) -> Result:
    """Returns the plan that `plan --json` prints, with `cluster` also for its nodes. Raises ConfigError."""
    config, notes = load_config(file, overrides)
    for note in notes:
        warn(note)
    if cluster:
        require_examples(cluster, config)
    prepared = prepare(config, None, progress, warn, "report", data="wanted", timed="always")
    if cluster and prepared.total_steps == UNKNOWN_STEPS and not config.training.time_limited:
        raise ConfigError("--nodes compares whole runs, but the length of an epoch is unknown; set training.max_steps.")
    result = plan_prepared(prepared)
    return {**result, "cluster": plan_nodes(prepared, cluster)} if cluster else result


def plan_prepared(prepared: Prepared) -> Result:
    config, result = prepared.config, _described(prepared)
    if not prepared.fits:
        changes = changes_that_fit(task_of(config), config, execution(prepared), prepared.machine.available)
        result["changes"] = [{"set": list(c.settings), "cost": c.cost, "memory": c.memory.least} for c in changes]
    return {**result, **_time(prepared)}


def plan_presets(overrides: Sequence[str], warn: Warn) -> list[Result]:
    rows = []
    for name in PRESETS:
        config, _ = load_config(Path(name), [*overrides, "training.max_steps=1000000"])
        task = task_of(config)
        prepared = prepare(
            task.with_vocabulary(config), None, ignore_message, warn, "report", data="unread", timed="always"
        )
        row = {"preset": name, **_described(prepared), **_time(prepared)}
        frugal = change_config(prepared.config, ["model.gradient_checkpointing=true"])
        smallest = replace(execution(prepared), micro_batch=1)
        row["least_memory_bytes"] = task.costs(frugal).memory(smallest).least
        tokens = OPTIMAL_TOKENS * row["parameters"]
        row["optimal_tokens"] = tokens
        row["optimal_seconds"] = tokens / row["tokens_per_second"] if row["tokens_per_second"] else None
        rows.append(row)
    return rows


def step_limits(prepared: Prepared, roofline: Roofline) -> dict[str, float]:
    """Returns the minimum seconds of each part of a step: its work at this machine's measured peak rates."""
    config, tokens = prepared.config, prepared.tokens_per_step
    costs = task_of(config).costs(config)
    work, traffic = costs.work(tokens), costs.traffic(execution(prepared))
    muon = work.muon if config.training.optimizer == "muon" else 0.0
    return {
        "attention": roofline.seconds(work.attention, 0),
        "matmul": roofline.seconds(work.matmul, 0),
        "loss": roofline.seconds(work.loss, 0, head=True),
        "optimizer": roofline.seconds(muon, traffic.optimizer),
        "other": roofline.seconds(0, traffic.other),
    }


def roofline_of(prepared: Prepared) -> Roofline:
    """Returns the machine's peak rates at this model's matrix shapes. Measured once and then read from the cache."""
    config, machine = prepared.config, prepared.machine
    products = task_of(config).costs(config).products()
    shapes, head = products.block, products.head
    tokens = min(ROOFLINE_TOKENS, round(prepared.environment.micro_batch * prepared.example_tokens))
    question = {
        "roofline": [[*shape, count] for shape, count in shapes.items()],
        "head": head,
        "tokens": tokens,
        "precision": machine.precision,
        "threads": machine.threads,
        "isa": isa(),
    }
    answer = cached_measurement(
        machine.cache, question, lambda: vars(measure_roofline(tokens, shapes, head, machine.precision))
    )
    return Roofline(**answer)


def _described(prepared: Prepared) -> Result:
    config, environment = prepared.config, prepared.environment
    parts = task_of(config).costs(config).parameters()
    return {
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "memory_bytes": prepared.memory.to_json(),
        "available_bytes": prepared.machine.available,
        "machine_bytes": total_memory(),
        "fits": prepared.fits,
        "batch_size": environment.micro_batch,
        "gradient_accumulation_steps": prepared.accumulation,
        "window": config.window,
        "precision": environment.precision,
        "compile": environment.compile,
        "kernels": environment.kernels,
        "optimizer": config.training.optimizer,
        "threads": environment.threads,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "tokens_per_step": prepared.tokens_per_step,
        "train_tokens": prepared.corpus.train_tokens if prepared.corpus else None,
    }


def _time(prepared: Prepared) -> Result:
    """Returns speed and duration. Values are None if the model is too large to time here."""
    config = prepared.config
    keys = (
        "tokens_per_second", "seconds_per_million_tokens", "step_seconds", "machine_share", "total_steps",
        "total_tokens", "epochs", "total_seconds", "finish",
    )  # fmt: skip
    result: Result = dict.fromkeys(keys)
    steps: int | None = None if prepared.total_steps == UNKNOWN_STEPS else prepared.total_steps
    if prepared.timing is not None:
        forecast = forecast_of(prepared)
        result["step_seconds"] = forecast.step_seconds
        result["tokens_per_second"] = prepared.learned_per_step / forecast.step_seconds
        result["seconds_per_million_tokens"] = 1e6 / result["tokens_per_second"]
        if prepared.machine.device.type == "cpu":
            limit = sum(step_limits(prepared, roofline_of(prepared)).values())
            result["machine_share"] = limit / forecast.step_seconds
        if steps is not None or config.training.time_limited:
            steps, result["total_seconds"] = length_of(prepared, forecast)
            result["finish"] = done_at(result["total_seconds"])
    if steps is not None:
        tokens = min(round(steps * prepared.learned_per_step), config.training.max_tokens or 1 << 62)
        result |= {"total_steps": steps, "total_tokens": tokens}
        if prepared.corpus:
            result["epochs"] = tokens / prepared.corpus.train_tokens
    return result

"""`sansgpu plan`: what a run costs in memory and hours, before it is begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sansgpu.config import PRESETS, load_config
from sansgpu.data.shards import Progress
from sansgpu.jobs.fitting import changes_that_fit
from sansgpu.jobs.prepare import Prepared, Warn, prepare, seconds_allowed, silent
from sansgpu.machine.memory import Execution
from sansgpu.machine.probe import isa, total_memory
from sansgpu.machine.remembered import remembered
from sansgpu.machine.roofline import Roofline, measure_roofline
from sansgpu.tasks import TASKS
from sansgpu.train.budget import DISK_BYTES_PER_SECOND, EVALUATED_IN_A_STEP
from sansgpu.train.forecast import Forecast, done_at
from sansgpu.train.schedule import UNKNOWN

Result = dict[str, Any]

START_SECONDS = {"off": 3.0, "on": 8.0}  # from the command to the first step, compiled graphs in the cache; measured
SAMPLED_LAYER_SECONDS = 0.4e-3  # a token and layer; measured on a small model
SAVE_SECONDS_PER_BYTE = 1 / 10e9  # copying in memory what a snapshot holds
ROOFLINE_TOKENS = 4096  # at most, of the products that are timed
OPTIMAL_TOKENS = 20  # a parameter: about where compute is best spent (Hoffmann et al., arXiv 2203.15556)


def plan(file: Path | None, overrides: Sequence[str], progress: Progress, warn: Warn) -> Result:
    """The plan of a configuration, as `plan --json` prints it. Raises ConfigError."""
    config, notes = load_config(file, overrides)
    for note in notes:
        warn(note)
    return plan_prepared(prepare(config, None, progress, warn, "report", data="wanted", timed="always"))


def plan_prepared(prepared: Prepared) -> Result:
    """The plan of what is prepared, with a timing."""
    config, result = prepared.config, _described(prepared)
    if not prepared.fits:
        changes = changes_that_fit(TASKS[config.kind], config, execution(prepared), prepared.machine.available)
        result["changes"] = [{"set": list(c.settings), "cost": c.cost, "memory": c.memory.least} for c in changes]
    return {**result, **_time(prepared)}


def plan_presets(overrides: Sequence[str], warn: Warn) -> list[Result]:
    """Memory and speed of every preset on this machine."""
    rows = []
    for name in PRESETS:
        config, _ = load_config(Path(name), [*overrides, "training.max_steps=1000000"])
        task = TASKS[config.kind]
        prepared = prepare(task.with_vocabulary(config), None, silent, warn, "report", data="unread", timed="always")
        row = {"preset": name, **_described(prepared), **_time(prepared)}
        frugal = prepared.config.model.model_copy(update={"gradient_checkpointing": True})
        smallest = replace(execution(prepared), micro_batch=1)
        row["least_memory_bytes"] = task.memory(prepared.config.model_copy(update={"model": frugal}), smallest).least
        tokens = OPTIMAL_TOKENS * row["parameters"]
        row["optimal_tokens"] = tokens
        row["optimal_seconds"] = tokens / row["tokens_per_second"] if row["tokens_per_second"] else None
        rows.append(row)
    return rows


def execution(prepared: Prepared) -> Execution:
    """How the run's steps are computed."""
    environment = prepared.environment
    return Execution(
        environment.micro_batch,
        prepared.accumulation,
        environment.precision,
        environment.compile,
        environment.kernels,
        prepared.config.training.optimizer,
        prepared.corpus.most_tokens if prepared.corpus else None,
    )


def step_limits(prepared: Prepared, roofline: Roofline) -> dict[str, float]:
    """Seconds that each part of a step takes at least on this machine: its work at the machine's own rates."""
    config, tokens = prepared.config, prepared.tokens_per_step
    work = TASKS[config.kind].work(config, tokens)
    traffic = TASKS[config.kind].traffic(config, execution(prepared))
    muon = work.muon if config.training.optimizer == "muon" else 0.0
    return {
        "attention": roofline.seconds(work.attention, 0),
        "matmul": roofline.seconds(work.matmul, 0),
        "loss": roofline.seconds(work.loss, 0, head=True),
        "optimizer": roofline.seconds(muon, traffic.optimizer),
        "other": roofline.seconds(0, traffic.other),
    }


def roofline_of(prepared: Prepared) -> Roofline:
    """The machine's rates at the shapes of this model, measured once a cache."""
    config, machine = prepared.config, prepared.machine
    products = TASKS[config.kind].products(config)
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
    answer = remembered(
        machine.cache, question, lambda: vars(measure_roofline(tokens, shapes, head, machine.precision))
    )
    return Roofline(**answer)


def _described(prepared: Prepared) -> Result:
    config, environment = prepared.config, prepared.environment
    parts = TASKS[config.kind].parameters(config)
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
    """Speed and duration; every value None where the model is too large to be timed here."""
    config, timing = prepared.config, prepared.timing
    keys = (
        "tokens_per_second", "step_seconds", "machine_share", "total_steps", "total_tokens", "epochs", "total_seconds",
        "finish",
    )  # fmt: skip
    result: Result = dict.fromkeys(keys)
    steps: int | None = None if prepared.total_steps == UNKNOWN else prepared.total_steps
    if timing is not None:
        forecast = forecast_of(prepared)
        result["step_seconds"] = forecast.step_seconds
        result["tokens_per_second"] = prepared.learned_per_step / forecast.step_seconds
        if prepared.machine.device.type == "cpu":
            limit = sum(step_limits(prepared, roofline_of(prepared)).values())
            result["machine_share"] = limit / forecast.step_seconds
        allowed = seconds_allowed(config)
        if steps is None or forecast.seconds(config.training, steps) > allowed:
            steps = _steps_within(prepared, forecast, allowed)
        result["total_seconds"] = forecast.seconds(config.training, steps)
        result["finish"] = done_at(result["total_seconds"])
    if steps is not None:
        tokens = min(round(steps * prepared.learned_per_step), config.training.max_tokens or 1 << 62)
        result |= {"total_steps": steps, "total_tokens": tokens}
        if prepared.corpus:
            result["epochs"] = tokens / prepared.corpus.train_tokens
    return result


def forecast_of(prepared: Prepared) -> Forecast:
    """The run's parts in seconds, by the timing of its blocks."""
    timing, config, training = prepared.timing, prepared.config, prepared.config.training
    assert timing is not None
    layers = TASKS[config.kind].layers(config)
    step = timing.step_seconds(layers, prepared.accumulation)
    passes = prepared.accumulation * (timing.ends_seconds + layers * timing.block_seconds)
    sampling = training.sample_tokens * layers * SAMPLED_LAYER_SECONDS
    held, weights = prepared.memory.snapshot, prepared.memory.weights
    return Forecast(
        startup_seconds=START_SECONDS[timing.compile],
        step_seconds=step,
        evaluation_seconds=passes * prepared.evaluated_share / EVALUATED_IN_A_STEP + sampling,
        save_seconds=held * SAVE_SECONDS_PER_BYTE,
        end_seconds=(held + weights) / DISK_BYTES_PER_SECOND,
    )


def _steps_within(prepared: Prepared, forecast: Forecast, allowed: float) -> int:
    training = prepared.config.training
    steps = int(allowed / forecast.step_seconds)
    while steps > 1 and forecast.seconds(training, steps) > allowed:
        steps -= max(1, steps // 200)
    return steps

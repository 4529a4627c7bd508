"""Estimates a prepared run's memory and time."""

from __future__ import annotations

from typing import Any

from sansgpu.config import Config
from sansgpu.data.shards import ReportProgress
from sansgpu.machine.cached_measurement import cached_measurement
from sansgpu.machine.probe import isa, total_memory
from sansgpu.machine.roofline import Roofline, measure_roofline
from sansgpu.models.huggingface.source import base_precision, file_formats
from sansgpu.planning.forecast import done_at, forecast_of, length_of
from sansgpu.planning.memory_fit import changes_that_fit
from sansgpu.planning.prepared import Prepared
from sansgpu.train.schedule import UNKNOWN_STEPS
from sansgpu.views.plan_table import MemoryChange, RunPlan

ROOFLINE_TOKENS = 4096  # maximum rows of timed matrix products


def plan_prepared(prepared: Prepared, progress: ReportProgress) -> RunPlan:
    """Returns a plan, with changes that make the run fit if it does not."""
    config, how = prepared.config, prepared.execution
    parts = prepared.costs.parameters()
    plan: RunPlan = {
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "memory_bytes": prepared.memory.to_json(),
        "available_bytes": prepared.available,
        "machine_bytes": total_memory(),
        "fits": prepared.fits,
        "batch_size": how.micro_batch,
        "gradient_accumulation_steps": how.accumulation,
        "window": config.window,
        "precision": how.precision,
        "base_precision": _base_precision(config, how.precision),
        "compile": how.compile,
        "kernels": how.kernels,
        "optimizer": how.optimizer,
        "learning_rate": config.training.learning_rate,
        "threads": how.threads,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "tokens_per_step": prepared.tokens_per_step,
        "train_tokens": prepared.corpus.train_tokens if prepared.corpus else None,
        "tokens_per_second": None,
        "seconds_per_million_tokens": None,
        "step_seconds": None,
        "machine_share": None,
        "total_steps": None,
        "total_tokens": None,
        "epochs": None,
        "total_seconds": None,
        "finish": None,
    }
    _add_time(plan, prepared, progress)
    if not prepared.fits:
        changes = changes_that_fit(config, how, prepared.available)
        plan["changes"] = [MemoryChange(set=[*c.settings], cost=c.cost, memory=c.memory.least) for c in changes]
    return plan


def _base_precision(config: Config, precision: str) -> str | None:
    """Returns how the frozen base of an adapter is stored in memory, e.g. int4; None without an adapter."""
    if config.model.adapter == "none":
        return None
    stored = base_precision(config.model)
    if stored == "file":
        return "+".join(file_formats(config.model))
    return precision if stored in (None, "bf16") else stored


def step_limits(prepared: Prepared, roofline: Roofline) -> dict[str, float]:
    """Returns the minimum seconds of each part of a step: its work at this machine's measured peak rates."""
    work, traffic = prepared.costs.work(prepared.tokens_per_step), prepared.costs.traffic(prepared.execution)
    muon = work.muon if prepared.execution.optimizer == "muon" else 0.0
    return {
        "attention": roofline.seconds(work.attention, 0),
        "matmul": roofline.seconds(work.matmul, 0),
        "loss": roofline.seconds(work.loss, 0, head=True),
        "optimizer": roofline.seconds(muon, traffic.optimizer),
        "other": roofline.seconds(0, traffic.other),
    }


def roofline_of(prepared: Prepared, progress: ReportProgress) -> Roofline:
    """Returns the machine's peak rates at this model's matrix shapes. Measured once and then read from the cache."""
    how, products = prepared.execution, prepared.costs.products()
    shapes, head = products.block, products.head
    tokens = min(ROOFLINE_TOKENS, round(how.micro_batch * prepared.example_tokens))
    question = {
        "roofline": [[*shape, count] for shape, count in shapes.items()],
        "head": head,
        "tokens": tokens,
        "precision": how.precision,
        "threads": how.threads,
        "isa": isa(),
    }

    def ask() -> dict[str, Any]:
        progress("timing matrix products and memory", 0, 0)
        return vars(measure_roofline(tokens, shapes, head, how.precision))

    return Roofline(**cached_measurement(prepared.cache, question, ask))


def _add_time(plan: RunPlan, prepared: Prepared, progress: ReportProgress) -> None:
    """Adds speed and duration, unless the model is too large to time here."""
    training = prepared.config.training
    steps: int | None = None if prepared.total_steps == UNKNOWN_STEPS else prepared.total_steps
    if prepared.timing is not None:
        forecast = forecast_of(prepared)
        tokens_per_second = prepared.learned_per_step / forecast.step_seconds
        plan["step_seconds"] = forecast.step_seconds
        plan["tokens_per_second"] = tokens_per_second
        plan["seconds_per_million_tokens"] = 1e6 / tokens_per_second
        if prepared.execution.device.type == "cpu":
            limit = sum(step_limits(prepared, roofline_of(prepared, progress)).values())
            plan["machine_share"] = limit / forecast.step_seconds
        if steps is not None or training.time_limited:
            steps, seconds = length_of(prepared, forecast)
            plan["total_seconds"], plan["finish"] = seconds, done_at(seconds)
    if steps is not None:
        tokens = min(round(steps * prepared.learned_per_step), training.max_tokens or 1 << 62)
        plan["total_steps"], plan["total_tokens"] = steps, tokens
        if prepared.corpus:
            plan["epochs"] = tokens / prepared.corpus.train_tokens

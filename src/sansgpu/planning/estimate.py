"""Estimates a prepared run's memory and time."""

from __future__ import annotations

from typing import Any

from sansgpu.machine.cached_measurement import cached_measurement
from sansgpu.machine.probe import isa, total_memory
from sansgpu.machine.roofline import Roofline, measure_roofline
from sansgpu.planning.forecast import done_at, forecast_of, length_of
from sansgpu.planning.memory_fit import changes_that_fit
from sansgpu.planning.prepared import Prepared
from sansgpu.train.schedule import UNKNOWN_STEPS

Result = dict[str, Any]

ROOFLINE_TOKENS = 4096  # maximum rows of timed matrix products


def plan_prepared(prepared: Prepared, suggest_changes: bool = True) -> Result:
    """Returns a plan, with changes that make the run fit if it does not."""
    result = _described(prepared)
    if suggest_changes and not prepared.fits:
        changes = changes_that_fit(prepared.config, prepared.execution, prepared.available)
        result["changes"] = [{"set": list(c.settings), "cost": c.cost, "memory": c.memory.least} for c in changes]
    return {**result, **_time(prepared)}


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


def roofline_of(prepared: Prepared) -> Roofline:
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
    answer = cached_measurement(
        prepared.cache, question, lambda: vars(measure_roofline(tokens, shapes, head, how.precision))
    )
    return Roofline(**answer)


def _described(prepared: Prepared) -> Result:
    config, how = prepared.config, prepared.execution
    parts = prepared.costs.parameters()
    return {
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
        "compile": how.compile,
        "kernels": how.kernels,
        "optimizer": how.optimizer,
        "threads": how.threads,
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
        if prepared.execution.device.type == "cpu":
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

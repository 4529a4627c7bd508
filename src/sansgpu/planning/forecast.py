"""Estimates a run's duration, from a timed step and the work between steps, and its final loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.parse import finish_time, normal_time, whole_number
from sansgpu.config.schema import Config
from sansgpu.config.training import TrainingConfig
from sansgpu.config.wording import truncate
from sansgpu.events.progress import ReportProgress
from sansgpu.kernels.roofline import Roofline, measure_roofline
from sansgpu.machine.measurements import cached_measurement
from sansgpu.machine.probe import isa, total_memory
from sansgpu.models.huggingface.source import base_precision, file_formats
from sansgpu.planning.memory_fit import changes_that_fit
from sansgpu.planning.resolve import seconds_allowed
from sansgpu.planning.results import MemoryChange, Projection, RunPlan
from sansgpu.tasks.task import ReferenceCorpus
from sansgpu.train.run import EVALUATED_IN_A_STEP, TrainingRun
from sansgpu.train.run_length import DISK_BYTES_PER_SECOND
from sansgpu.train.schedule import ONE_PHASE, UNKNOWN_STEPS, StepPhases

ROOFLINE_TOKENS = 4096  # maximum rows of timed matrix products
MAX_SECONDS = 1e10  # about 300 years; later dates may overflow datetime
START_SECONDS = {"off": 3.0, "on": 8.0}  # measured time to the first step, without and with (cached) compilation
SAMPLED_LAYER_SECONDS = 0.4e-3  # time of one layer for a generated token; measured on a small model
SAVE_SECONDS_PER_BYTE = 1 / 10e9  # time to copy a snapshot in memory
# Bits per byte = floor + size term + data term, the form of Hoffmann et al. (arXiv 2203.15556). Fitted to runs of this
# recipe with 1.9M to 17M parameters and 1 to 10M tokens of English (docs/lab-notes.md). The balance of the terms tells
# which model size to choose; the sum does not predict the loss on other text.
_FLOOR = 0.93
_SIZE, _SIZE_POWER = 0.224, 0.65
_DATA, _DATA_POWER = 0.65, 0.5
# Weights beyond this number for each unique token add little (docs/lab-notes.md): the inverse of the useful size is the
# sum of the inverses of both.
_USEFUL_WEIGHTS = 7.7
_REPEATS = 15.4  # decay constant of the value of repeated epochs (Muennighoff et al., arXiv 2305.16264)


@dataclass(frozen=True)
class Forecast:
    """The durations of the parts of a run."""

    startup_seconds: float  # loading and compiling before the first step
    step_seconds: float
    evaluation_seconds: float
    save_seconds: float  # time the loop waits for a snapshot
    end_seconds: float  # last snapshot and export after the last step
    phases: StepPhases = ONE_PHASE
    later_evaluation_seconds: float = 0.0  # duration of an evaluation after layers have stopped learning

    @property
    def later_step_seconds(self) -> float:
        """The duration of a step after layers have stopped learning."""
        return self.step_seconds * self.phases.later_work

    def seconds(self, training: TrainingConfig, steps: int, first: int = 0) -> float:
        """Returns the time to train from step `first` to step `steps`, including evaluations and snapshots."""
        evaluations = _due(training.eval_steps, first, steps) + (training.eval_on_start and not first)
        frozen, later = self.phases.freeze_step, 0
        if steps > frozen:
            later = _due(training.eval_steps, max(first, frozen), steps)
        saves = _due(training.save_steps, first, steps)
        evaluating = (evaluations - later) * self.evaluation_seconds + later * self.later_evaluation_seconds
        training_seconds = self.phases.work(first, steps - first) * self.step_seconds
        return self.startup_seconds + training_seconds + evaluating + saves * self.save_seconds + self.end_seconds


def forecast_of(run: TrainingRun, nodes: int = 1, step_seconds: float | None = None) -> Forecast:
    """Estimates the durations of a run's parts. On several nodes, `step_seconds` is the duration of a step on all."""
    timing, training = run.timing, run.config.training
    assert timing is not None
    costs, accumulation, later = run.costs, run.execution.accumulation, run.later_costs
    passes, later_passes = (accumulation * timing.pass_seconds(one.evaluated_layers) for one in (costs, later))
    sampling = training.sample_tokens * costs.layers * SAMPLED_LAYER_SECONDS
    snapshot, weights = run.memory.snapshot, run.memory.weights
    before = 0.0  # duration of passes over the data before training, in steps
    if isinstance(run.corpus, ReferenceCorpus):
        before = run.corpus.reference_tokens / run.tokens_per_step / EVALUATED_IN_A_STEP
    keeping = 0.0  # before the first step; if layers stop learning later, `run.phases` has it
    if costs.skips_frozen:
        keeping = run.kept_tokens / run.tokens_per_step * accumulation * timing.block_seconds * costs.frozen_pass_layers
    # An evaluation that generates text takes as long as a step generates, in proportion to their completions.
    generated = timing.generation_seconds(costs.layers)
    evaluated, later_evaluated = (
        run.eval_token_ratio * (generated if run.config.settings.generates else one / EVALUATED_IN_A_STEP)
        for one in (passes, later_passes)
    )
    return Forecast(
        startup_seconds=START_SECONDS[run.execution.compile] + (passes * before + keeping) / nodes,
        step_seconds=timing.step_seconds(costs, accumulation) if step_seconds is None else step_seconds,
        evaluation_seconds=evaluated / nodes + sampling,
        save_seconds=snapshot * SAVE_SECONDS_PER_BYTE,
        end_seconds=(snapshot + weights) / DISK_BYTES_PER_SECOND,
        phases=run.phases,
        later_evaluation_seconds=later_evaluated / nodes + sampling,
    )


def length_of(run: TrainingRun, forecast: Forecast) -> tuple[int, float]:
    """Returns (steps, seconds) of the run, limited by its time budget."""
    training, allowed = run.config.training, seconds_allowed(run.config)
    steps = run.total_steps
    if steps == UNKNOWN_STEPS or forecast.seconds(training, steps) > allowed:
        steps = int(allowed / min(forecast.step_seconds, forecast.later_step_seconds))
        while steps > 1 and forecast.seconds(training, steps) > allowed:
            steps -= max(1, steps // 200)
    return steps, forecast.seconds(training, steps)


def done_at(seconds: float, start: datetime | None = None) -> str:
    """Returns the local time `seconds` after `start`, by default now, to the minute."""
    return ((start or datetime.now()) + timedelta(seconds=min(seconds, MAX_SECONDS))).isoformat(timespec="minutes")


def target_steps(text: str) -> tuple[int, ...]:
    """Parses numbers of steps such as 500,5000. Raises ConfigError."""
    steps = tuple(whole_number(part.strip(), UNKNOWN_STEPS) or 0 for part in text.split(","))
    if not all(steps):
        raise ConfigError(f"--targets is {truncate(text)!r}; write numbers of steps, e.g. 500,5000.")
    return steps


def start_time(text: str) -> datetime:
    """Returns the next occurrence of a time such as 18:00 or 6PM, or the given date and time. Raises ConfigError."""
    now = datetime.now()
    try:
        moment = normal_time(text)
    except ValueError as error:
        raise ConfigError(f"--start {error}.") from None
    start = datetime.fromisoformat(moment) if "T" in moment else finish_time(moment, now)
    if start < now:
        raise ConfigError(f"--start is {text}, which is in the past; set a later time.")
    return start


def projections(
    targets: Sequence[int], first: int, cold: Forecast, warm: Forecast, training: TrainingConfig, start: datetime | None
) -> list[Projection]:
    """Returns when each number of steps would be done: `cold` from step 0, and `warm` from a snapshot of step `first`.

    The times of day count from `start`, by default now.
    """
    rows: list[Projection] = []
    for steps in targets:
        total = cold.seconds(training, steps)
        row: Projection = {"steps": steps, "seconds": total, "done": done_at(total, start)}
        if steps > first:
            rest = warm.seconds(training, steps, first)
            row["seconds_from_snapshot"], row["done_from_snapshot"] = rest, done_at(rest, start)
        rows.append(row)
    return rows


def _due(every: int, first: int, steps: int) -> int:
    """Counts the occurrences of an event due every `every` steps and at the last step."""
    inside = (steps - 1) // every - first // every if every else 0
    return max(0, inside) + 1


def describe_plan(run: TrainingRun, progress: ReportProgress) -> RunPlan:
    """Returns a plan, with changes that make the run fit if it does not."""
    config, execution = run.config, run.execution
    parts = run.costs.parameters()
    plan: RunPlan = {
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "memory_bytes": run.memory.to_json(),
        "available_bytes": run.available,
        "machine_bytes": total_memory(),
        "fits": run.fits,
        "batch_size": execution.micro_batch,
        "gradient_accumulation_steps": execution.accumulation,
        "window": config.window,
        "precision": execution.precision,
        "base_precision": _base_precision(config, execution.precision),
        "compile": execution.compile,
        "kernels": execution.kernels,
        "optimizer": execution.optimizer,
        "learning_rate": config.training.learning_rate,
        "threads": execution.threads,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "tokens_per_step": run.tokens_per_step,
        "train_tokens": run.corpus.train_tokens if run.corpus else None,
        "kept_bytes": run.kept_bytes,
        "tokens_per_second": None,
        "seconds_per_million_tokens": None,
        "step_seconds": None,
        "freeze_step": None,
        "later_step_seconds": None,
        "machine_share": None,
        "total_steps": None,
        "limit_steps": None if run.total_steps == UNKNOWN_STEPS else run.total_steps,
        "total_tokens": None,
        "epochs": None,
        "total_seconds": None,
        "finish": None,
    }
    _add_time(plan, run, progress)
    if not run.fits:
        changes = changes_that_fit(config, execution, run.available)
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


def step_limits(run: TrainingRun, roofline: Roofline) -> dict[str, float]:
    """Returns the minimum seconds of each part of a step: its work at this machine's measured peak rates."""
    work, traffic = run.costs.work(run.computed_per_step), run.costs.traffic(run.execution)
    muon = work.muon if run.execution.optimizer == "muon" else 0.0
    return {
        "attention": roofline.seconds(work.attention, 0),
        "matmul": roofline.seconds(work.matmul, 0),
        "loss": roofline.seconds(work.loss, 0, head=True),
        "optimizer": roofline.seconds(muon, traffic.optimizer),
        "other": roofline.seconds(0, traffic.other),
    }


def roofline_of(run: TrainingRun, progress: ReportProgress) -> Roofline:
    """Returns the machine's peak rates at this model's matrix shapes. Measured once and then read from the cache."""
    execution, products = run.execution, run.costs.products()
    shapes, head = products.block, products.head
    tokens = min(ROOFLINE_TOKENS, round(execution.micro_batch * run.example_tokens))
    key = {
        "roofline": [[*shape, count] for shape, count in shapes.items()],
        "head": head,
        "tokens": tokens,
        "precision": execution.precision,
        "threads": execution.threads,
        "isa": isa(),
    }

    def measure() -> dict[str, Any]:
        progress("timing matrix products and memory", 0, 0)
        return vars(measure_roofline(tokens, shapes, head, execution.precision))

    return Roofline(**cached_measurement(run.cache, key, measure))


def _add_time(plan: RunPlan, run: TrainingRun, progress: ReportProgress) -> None:
    """Adds speed and duration, unless the model is too large to time on this machine."""
    training = run.config.training
    steps: int | None = None if run.total_steps == UNKNOWN_STEPS else run.total_steps
    if run.timing is not None:
        forecast = forecast_of(run)
        tokens_per_second = run.learned_per_step / forecast.step_seconds
        plan["step_seconds"] = forecast.step_seconds
        if run.phases.freeze_step < run.total_steps:
            plan["freeze_step"], plan["later_step_seconds"] = run.phases.freeze_step, forecast.later_step_seconds
        plan["tokens_per_second"] = tokens_per_second
        plan["seconds_per_million_tokens"] = 1e6 / tokens_per_second
        if run.execution.device.type == "cpu":
            limit = sum(step_limits(run, roofline_of(run, progress)).values())
            plan["machine_share"] = limit / forecast.step_seconds
        if steps is not None or training.time_limited:
            steps, seconds = length_of(run, forecast)
            plan["total_seconds"], plan["finish"] = seconds, done_at(seconds)
    if steps is not None:
        tokens = min(round(steps * run.learned_per_step), training.max_tokens or 1 << 62)
        plan["total_steps"], plan["total_tokens"] = steps, tokens
        if run.corpus:
            plan["epochs"] = tokens / run.corpus.train_tokens


def effective_tokens(tokens: float, unique: float) -> float:
    """Returns how many unique tokens would be worth as much as `tokens`, if a corpus of `unique` tokens is repeated."""
    if tokens <= unique:
        return tokens
    return unique * (1 + _REPEATS * (1 - math.exp(-(tokens / unique - 1) / _REPEATS)))


def expected_bits_per_byte(parameters: float, tokens: float, unique: float) -> float:
    """Returns the estimated bits per byte after training; comparable only between models on the same text."""
    inverse = 1 / parameters + 1 / (_USEFUL_WEIGHTS * unique)
    size = _SIZE * math.pow(1e6 * inverse, _SIZE_POWER)
    return _FLOOR + size + _DATA * math.pow(effective_tokens(tokens, unique) / 1e6, -_DATA_POWER)

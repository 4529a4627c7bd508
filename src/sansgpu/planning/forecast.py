"""Estimates the duration of a run: its timed step and the work between steps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sansgpu.config import TrainingConfig
from sansgpu.planning.prepare import seconds_allowed
from sansgpu.planning.prepared import Prepared
from sansgpu.train.budget import DISK_BYTES_PER_SECOND, EVALUATED_IN_A_STEP
from sansgpu.train.schedule import UNKNOWN_STEPS

MAX_SECONDS = 1e10  # about 300 years; later dates may overflow datetime
START_SECONDS = {"off": 3.0, "on": 8.0}  # until the first step, by compile, with a warm cache; measured
SAMPLED_LAYER_SECONDS = 0.4e-3  # per generated token and layer; measured on a small model
SAVE_SECONDS_PER_BYTE = 1 / 10e9  # to copy a snapshot in memory


@dataclass(frozen=True)
class Forecast:
    """The durations of the parts of a run."""

    startup_seconds: float  # loading and compiling before the first step
    step_seconds: float
    evaluation_seconds: float
    save_seconds: float  # time the loop waits for a snapshot
    end_seconds: float  # last snapshot and export after the last step

    def seconds(self, training: TrainingConfig, steps: int, first: int = 0) -> float:
        """Returns the time to train from step `first` to step `steps`, including evaluations and snapshots."""
        evaluations = _due(training.eval_steps, first, steps)
        saves = _due(training.save_steps, first, steps)
        between = evaluations * self.evaluation_seconds + saves * self.save_seconds
        return self.startup_seconds + (steps - first) * self.step_seconds + between + self.end_seconds


def forecast_of(prepared: Prepared, nodes: int = 1, step_seconds: float | None = None) -> Forecast:
    """Estimates the run's parts in seconds from its timing. On several nodes, `step_seconds` is their joint step."""
    timing, training = prepared.timing, prepared.config.training
    assert timing is not None
    layers, accumulation = prepared.costs.layers, prepared.execution.accumulation
    passes = accumulation * timing.pass_seconds(layers)
    sampling = training.sample_tokens * layers * SAMPLED_LAYER_SECONDS
    snapshot, weights = prepared.memory.snapshot, prepared.memory.weights
    return Forecast(
        startup_seconds=START_SECONDS[timing.compile],
        step_seconds=timing.step_seconds(layers, accumulation) if step_seconds is None else step_seconds,
        evaluation_seconds=passes * prepared.eval_token_ratio / EVALUATED_IN_A_STEP / nodes + sampling,
        save_seconds=snapshot * SAVE_SECONDS_PER_BYTE,
        end_seconds=(snapshot + weights) / DISK_BYTES_PER_SECOND,
    )


def length_of(prepared: Prepared, forecast: Forecast) -> tuple[int, float]:
    """Returns (steps, seconds) of the run, limited by its time budget."""
    training, allowed = prepared.config.training, seconds_allowed(prepared.config)
    steps = prepared.total_steps
    if steps == UNKNOWN_STEPS or forecast.seconds(training, steps) > allowed:
        steps = int(allowed / forecast.step_seconds)
        while steps > 1 and forecast.seconds(training, steps) > allowed:
            steps -= max(1, steps // 200)
    return steps, forecast.seconds(training, steps)


def done_at(seconds: float) -> str:
    """Returns the local time `seconds` from now, to the minute."""
    return (datetime.now() + timedelta(seconds=min(seconds, MAX_SECONDS))).isoformat(timespec="minutes")


def _due(every: int, first: int, steps: int) -> int:
    """Counts the occurrences of an event due every `every` steps and at the last step."""
    inside = (steps - 1) // every - first // every if every else 0
    return max(0, inside) + 1

"""Time estimate of a prepared run, from its timed step and the work between steps."""

from __future__ import annotations

from sansgpu.machine.memory import Execution
from sansgpu.planning.prepare import Prepared, seconds_allowed
from sansgpu.tasks import task_of
from sansgpu.train.budget import DISK_BYTES_PER_SECOND, EVALUATED_IN_A_STEP
from sansgpu.train.forecast import Forecast
from sansgpu.train.schedule import UNKNOWN_STEPS

START_SECONDS = {"off": 3.0, "on": 8.0}  # until the first step, by compile, with a warm cache; measured
SAMPLED_LAYER_SECONDS = 0.4e-3  # per generated token and layer; measured on a small model
SAVE_SECONDS_PER_BYTE = 1 / 10e9  # to copy a snapshot in memory


def execution(prepared: Prepared) -> Execution:
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


def forecast_of(prepared: Prepared, nodes: int = 1, step_seconds: float | None = None) -> Forecast:
    """Estimates the run's parts in seconds from its timing. On several nodes, `step_seconds` is their joint step."""
    timing, config, training = prepared.timing, prepared.config, prepared.config.training
    assert timing is not None
    layers = task_of(config).costs(config).layers
    passes = prepared.accumulation * timing.pass_seconds(layers)
    sampling = training.sample_tokens * layers * SAMPLED_LAYER_SECONDS
    snapshot, weights = prepared.memory.snapshot, prepared.memory.weights
    return Forecast(
        startup_seconds=START_SECONDS[timing.compile],
        step_seconds=timing.step_seconds(layers, prepared.accumulation) if step_seconds is None else step_seconds,
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

"""Estimates the duration of a run: its timed step and the work between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sansgpu.config import ConfigError, TrainingConfig
from sansgpu.config.parse import normal_time, whole_number
from sansgpu.config.wording import truncate
from sansgpu.planning.prepare import seconds_allowed
from sansgpu.planning.prepared import Prepared
from sansgpu.tasks.task import ReferenceCorpus
from sansgpu.train.budget import DISK_BYTES_PER_SECOND, EVALUATED_IN_A_STEP, finish_time
from sansgpu.train.schedule import UNKNOWN_STEPS
from sansgpu.views.bench import Projection

MAX_SECONDS = 1e10  # about 300 years; later dates may overflow datetime
START_SECONDS = {"off": 3.0, "on": 8.0}  # measured time to the first step, without and with (cached) compilation
SAMPLED_LAYER_SECONDS = 0.4e-3  # time of one layer for a generated token; measured on a small model
SAVE_SECONDS_PER_BYTE = 1 / 10e9  # time to copy a snapshot in memory


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
        evaluations = _due(training.eval_steps, first, steps) + (training.eval_on_start and not first)
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
    before = 0.0  # passes over the data before training, as a number of steps
    if isinstance(prepared.corpus, ReferenceCorpus):
        before = prepared.corpus.reference_tokens / prepared.tokens_per_step / EVALUATED_IN_A_STEP
    return Forecast(
        startup_seconds=START_SECONDS[prepared.execution.compile] + passes * before / nodes,
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


def done_at(seconds: float, start: datetime | None = None) -> str:
    """Returns the local time `seconds` after `start`, by default now, to the minute."""
    return ((start or datetime.now()) + timedelta(seconds=min(seconds, MAX_SECONDS))).isoformat(timespec="minutes")


def target_steps(text: str) -> tuple[int, ...]:
    """Parses numbers of steps such as 500,5000. Raises ConfigError."""
    steps = tuple(whole_number(part.strip(), UNKNOWN_STEPS) or 0 for part in text.split(","))
    if not all(steps):
        raise ConfigError(f"--targets is {truncate(text)!r}; give numbers of steps, e.g. 500,5000.")
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
        raise ConfigError(f"--start is {text}, which is in the past; give a later time.")
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

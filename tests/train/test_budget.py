"""Steps are laid over the time there is."""

from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import ConfigError, TrainingConfig, load_config
from sansgpu.train.budget import Budget, finish_time
from sansgpu.train.forecast import Forecast
from sansgpu.train.schedule import UNKNOWN, learning_rate, total_steps, warmup_steps

NOW = datetime(2026, 3, 1, 22, 30)


def test_a_time_of_day_is_the_next_one() -> None:
    assert finish_time("23:00", NOW) == datetime(2026, 3, 1, 23, 0)
    assert finish_time("07:00", NOW) == datetime(2026, 3, 2, 7, 0)
    assert finish_time("22:30", NOW) == NOW + timedelta(days=1)
    assert finish_time("2026-03-04T05:06", NOW) == datetime(2026, 3, 4, 5, 6)
    with pytest.raises(ConfigError, match="is over"):
        finish_time("2026-03-01T22:29", NOW)


@pytest.mark.parametrize(
    ("given", "read"), [("07:00", "07:00"), ("17:30", "17:30"), ("2030-01-31 07:00", "2030-01-31T07:00:00")]
)
def test_yaml_does_not_turn_a_time_into_a_number(given: str, read: str) -> None:
    config, _ = load_config(None, [f"training.until={given}"])
    assert config.training.until == read


@settings(deadline=None)
@given(
    step=st.floats(0.01, 10), noise=st.lists(st.floats(0.8, 1.3), min_size=50, max_size=50), hours=st.floats(0.1, 10),
    validation=st.floats(0, 20), evaluate=st.sampled_from([0, 10, 1000]),
)  # fmt: skip
def test_a_run_simulated_on_a_clock_of_its_own_ends_within_its_budget(
    step: float, noise: list[float], hours: float, validation: float, evaluate: int
) -> None:
    clock, done, evaluations = 30.0, 0, 0
    training = TrainingConfig(max_hours=hours, eval_steps=evaluate, warmup_steps=0)
    budget = Budget(training, lambda: clock, validation, 0)
    total, evaluation = UNKNOWN, step * validation / 3
    while done < total:
        seconds = step * noise[done % len(noise)]
        clock += seconds
        done += 1
        if done > 1:
            budget.stepped(seconds)
        if evaluate and done % evaluate == 0 and done < total:
            clock += evaluation
            evaluations += 1
            budget.evaluated(evaluation)
        if done < total and budget.due() and (left := budget.steps_left()) is not None:
            total = done + left
    clock += evaluation  # the last one
    allowed = hours * 3600
    tolerance = 2 * step + (evaluation if not evaluations else 0)
    assert clock <= max(allowed, 30 + 3 * step + evaluation) + tolerance
    assert clock >= 0.9 * allowed - 2 * evaluation - 4 * step


def test_without_a_limit_nothing_is_laid() -> None:
    budget = Budget(TrainingConfig(), lambda: 5.0, 1.0, 0)
    assert not budget.due()
    assert budget.seconds_left() == float("inf")


def test_the_schedule_of_a_run_by_the_clock() -> None:
    training = TrainingConfig(max_hours=1, warmup_steps=50)
    assert total_steps(training, 10, 1000) == UNKNOWN
    assert total_steps(training.model_copy(update={"max_steps": 7}), 10, 1000) == 7
    assert warmup_steps(training, 100) == 10
    assert warmup_steps(training, 10_000) == 50
    assert warmup_steps(TrainingConfig(warmup_steps=50), 100) == 50
    assert learning_rate(training, 1000, UNKNOWN) == training.learning_rate


@given(st.integers(1, 50), st.integers(0, 400), st.integers(1, 400), st.integers(0, 50))
def test_a_forecast_counts_what_falls_due(every: int, first: int, more: int, saves: int) -> None:
    training = TrainingConfig(eval_steps=every, save_steps=saves)
    forecast = Forecast(7.0, 1.0, 100.0, 10_000.0, 0.5)
    last = first + more
    evaluations = len([s for s in range(first + 1, last) if s % every == 0]) + 1
    saved = len([s for s in range(first + 1, last) if saves and s % saves == 0]) + 1
    assert forecast.seconds(training, last, first) == pytest.approx(7.5 + more + 100 * evaluations + 10_000 * saved)

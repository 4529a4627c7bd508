"""Warnings appear for unhealthy runs only."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import TrainingConfig
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.train.health import Health

WELL: dict[str, Any] = {
    "withheld_percent": 0.0, "memory_available_bytes": 8e9, "memory_limit_bytes": 16e9, "other_percent": 3.0,
    "stolen_percent": 0.0, "throttled": 0, "major_faults_per_second": 0.0, "swap_bytes": 0,
}  # fmt: skip


def step(number: int, loss: float, norm: float = 1.0, data: float = 0.0, **system: float) -> dict[str, Any]:
    return {
        "event": "step", "step": 10 * number, "loss": loss, "grad_norm": norm, "total_steps": 4000, "rss_bytes": 10**9,
        "step_seconds": 1.0, "phase_seconds": {"data": data}, "system": {**WELL, **system},
    }  # fmt: skip


def evaluation(number: int, loss: float) -> dict[str, Any]:
    return {"event": "eval", "step": 10 * number, "loss": loss}


def causes(events: list[dict[str, Any]]) -> list[str]:
    health = Health(TrainingConfig())
    return [warning["cause"] for event in events for warning in health.observe(event)]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    power=st.floats(0.07, 0.4),
    noise=st.floats(0.0, 0.02),
    every=st.sampled_from([1, 10, 100]),
)
def test_a_loss_that_falls_by_a_power_law_is_well(seed: int, power: float, noise: float, every: int) -> None:
    draw = random.Random(seed)
    events = [step(n, 6 * n**-power * (1 + draw.gauss(0, noise / 10)), draw.uniform(0.5, 2)) for n in range(1, 400)]
    events += [evaluation(n, 6 * n**-power * (1 + draw.uniform(-0.004, 0.004))) for n in range(400, 430, every)]
    assert causes(events) == []


def test_a_rising_loss_is_reported_once_until_it_falls_again() -> None:
    falls = [step(n, 6 - 0.05 * n) for n in range(1, 41)]
    rises = [step(n, 4 + 0.1 * (n - 40)) for n in range(41, 61)]
    falls_again = [step(n, 6 - 0.15 * (n - 60)) for n in range(61, 80)]
    assert causes(falls) == []
    assert causes(falls + rises).count("rising") == 1
    assert causes(falls + rises + falls_again + rises).count("rising") == 2
    assert causes(falls + rises)[0] == "rising"


def test_a_flat_loss_is_reported_but_not_near_the_end() -> None:
    events = [step(n, 5.0 + 0.001 * (n % 3)) for n in range(1, 100)]
    assert causes(events) == ["flat"]
    assert causes([{**event, "total_steps": event["step"] + 5} for event in events]) == []


def test_a_gradient_spike_names_the_norm() -> None:
    events = [step(n, 6 - 0.05 * n, 1 + 0.1 * (n % 4)) for n in range(1, 31)]
    health = Health(TrainingConfig())
    assert [warning for event in events for warning in health.observe(event)] == []
    warning = health.observe(step(31, 4.4, 30.0))[0]
    assert warning["cause"] == "spike"
    assert warning["step"] == 310
    assert "30" in warning["message"]
    assert "training.learning_rate" in warning["message"]


def test_overfitting_names_the_best_step() -> None:
    health = Health(TrainingConfig())
    losses = [4.0, 3.5, 3.3, 3.4, 3.6]
    said = [warning for n, loss in enumerate(losses) for warning in health.observe(evaluation(n, loss))]
    assert [warning["cause"] for warning in said] == ["overfitting"]
    assert "step 20" in said[0]["message"]


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("memory", {"memory_available_bytes": 0.5e9}),
        ("swap", {"major_faults_per_second": 100.0, "swap_bytes": 10**9}),
        ("neighbour", {"other_percent": 90.0}),
        ("neighbour", {"stolen_percent": 90.0}),
        ("heat", {"throttled": 3}),
        ("threads", {"withheld_percent": 20.0}),
        ("data", {"data": 0.4}),
    ],
)
def test_a_lasting_problem_of_the_machine_causes_one_warning(cause: str, told: dict[str, float]) -> None:
    well, ill = step(1, 5.0), step(2, 4.9, **told)
    assert causes([well, ill, well, ill]) == []
    assert causes([well, ill, ill, ill, ill]) == [cause]
    assert causes([ill, ill, well, ill, ill]) == [cause, cause]


def test_unknown_measurements_cause_no_warning() -> None:
    unknown = dict.fromkeys(WELL)
    events: list[dict[str, Any]] = [{**step(n, 5 / n), "system": told} for n in (1, 2, 3) for told in (None, unknown)]
    assert causes(events) == []


@pytest.mark.parametrize(
    ("rewards", "interval", "warned"),
    [([0.8, 0.5, 0.4], 0.1, True), ([0.8, 0.75, 0.74], 0.1, False), ([0.4, 0.5, 0.8], 0.1, False)],
)
def test_a_reward_falls_if_its_best_value_is_outside_of_its_interval(
    rewards: list[float], interval: float, warned: bool
) -> None:
    health, messages = Health(TrainingConfig(), SCHEMA.tasks.kinds["grpo"].main_metric), list[str]()
    for number in range(1, 100):
        assert not health.observe(step(number, -0.001 * number))  # the loss of a step says nothing
    for number, reward in enumerate(rewards, 100):
        bounds = [reward - interval, reward + interval]
        event = {**evaluation(number, -reward), "reward": reward, "reward_interval": bounds}
        messages += [warning["message"] for warning in health.observe(event)]
    assert len(messages) == warned
    assert not warned or messages[0].startswith(
        "the validation reward is falling: it is 0.4000 and was 0.8000 at step 1,000; --snapshot best selects"
    )

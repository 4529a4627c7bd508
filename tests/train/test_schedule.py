"""Schedules of the learning rate and the window, and the length of a run."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.config import ConfigError, TrainingConfig
from sansgpu.data.pack import piece_length
from sansgpu.tasks.configuration import load_config
from sansgpu.train.schedule import learning_rate, repetition_problem, total_steps


def rates(total: int, **settings: object) -> list[float]:
    training = TrainingConfig.model_validate({"learning_rate": 1.0, "warmup_steps": 4, **settings})
    return [learning_rate(training, step, total) for step in range(total)]


@pytest.mark.parametrize("scheduler", ["cosine", "linear", "polynomial", "constant", "wsd"])
def test_warm_up_rises_by_equal_steps_to_the_peak(scheduler: str) -> None:
    assert rates(40, lr_scheduler=scheduler)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_warm_up_may_be_a_fraction_of_the_steps() -> None:
    for total in (40, 1000):
        curve = rates(total, warmup_ratio=0.1, lr_scheduler="constant", max_hours=1)
        assert curve == [min(1.0, (step + 1) / (total // 10 + 1)) for step in range(total)]


def test_two_ways_to_set_the_warm_up_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps and training\.warmup_ratio both set the warmup; remove one"):
        load_config(None, ["training.warmup_steps=7", "training.warmup_ratio=0.1"])
    assert load_config(None, ["training.warmup_ratio=0.1"])[0].training.warmup_ratio == 0.1


@pytest.mark.parametrize("scheduler", ["cosine", "linear", "polynomial", "wsd"])
def test_the_decay_spans_exactly_the_steps_of_the_run(scheduler: str) -> None:
    for total in (20, 400):
        curve = rates(total, lr_scheduler=scheduler)
        assert curve[-1] < 3 / total
        assert learning_rate(TrainingConfig(learning_rate=1.0, warmup_steps=4), total, total) == pytest.approx(0)
        assert all(a >= b for a, b in pairwise(curve[4:]))


def test_wsd_is_flat_until_its_decay_begins() -> None:
    curve = rates(100, decay_ratio=0.25)
    assert curve[4:76] == [1.0] * 72
    assert curve[76:] == pytest.approx([(100 - step) / 25 for step in range(76, 100)])


def test_polynomial_decay_is_that_of_transformers() -> None:
    from transformers import get_polynomial_decay_schedule_with_warmup

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = get_polynomial_decay_schedule_with_warmup(optimizer, 0, 50, lr_end=0.1, power=2.5)
    ours = rates(50, lr_scheduler="polynomial", lr_power=2.5, min_lr_ratio=0.1, warmup_steps=0)
    for rate in ours:
        assert rate == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates(50, lr_scheduler="polynomial") == rates(50, lr_scheduler="linear")


def test_constant_stays_and_the_floor_holds() -> None:
    assert rates(30, lr_scheduler="constant")[4:] == [1.0] * 26
    assert min(rates(30, lr_scheduler="cosine", min_lr_ratio=0.1, warmup_steps=0)) >= 0.1


def test_pieces_double_in_equal_stages_until_they_are_the_window() -> None:
    training = TrainingConfig(window_warmup_ratio=0.3)
    pieces = [piece_length(training, 256, step, 100) for step in range(100)]
    assert pieces == [32] * 10 + [64] * 10 + [128] * 10 + [256] * 70
    assert piece_length(training, 300, 29, 100) == 256
    assert piece_length(training, 32, 0, 100) == 32
    assert piece_length(TrainingConfig(window_warmup_ratio=0), 256, 0, 100) == 256


@given(st.integers(1, 500), st.integers(1, 400), st.integers(1, 5))
def test_the_first_limit_reached_decides(steps: int, tokens: int, epochs: int) -> None:
    training = TrainingConfig(max_steps=steps, max_tokens=tokens, num_epochs=epochs)
    by_tokens = -(-tokens * 30 // 300)
    assert total_steps(training, steps_per_epoch=30, tokens_per_epoch=300) == min(steps, by_tokens, 30 * epochs)


def test_without_a_limit_a_run_is_one_epoch() -> None:
    assert total_steps(TrainingConfig(), steps_per_epoch=17, tokens_per_epoch=1000) == 17


def test_only_large_models_that_repeat_their_text_often_are_warned_about() -> None:
    assert repetition_problem(8, 300_000, 5_000_000) is None
    assert repetition_problem(100, 5_000_000, 300_000) is None
    problem = repetition_problem(16, 300_000, 5_000_000)
    assert problem is not None
    assert "read its text 16 times" in problem
    assert "set training.num_epochs to 4" in problem

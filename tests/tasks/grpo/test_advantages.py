"""The built-in reward, the advantages of rewards, and the mean reward of an evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.data.forms.answers import answer_column, right_answer
from sansgpu.tasks.evaluation import wilson
from sansgpu.tasks.grpo.evaluate import GRPOEvaluator
from sansgpu.tasks.grpo.losses import MIN_DEVIATION, advantages
from sansgpu.tasks.grpo.rewards import is_right
from sansgpu.tasks.grpo.rollout import Rewarded
from sansgpu.tasks.grpo.rows import PromptExamples


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("17 + 4 = 21", "21", True),
        ("The answer is 1,200.", "1200", True),
        ("It is 21.0", "21", True),
        ("$21$.", "21", True),
        ("21, or maybe 22", "21", False),
        ("-3", "3", False),
        ("Half, i.e. .5", "0.5", True),
        ("no number", "21", False),
        ("", "21", False),
        (r"so \boxed{21} because 5 < 6", "21", True),
        ("20 + 1 = 21\n#### 21", "3 * 7 = 21\n#### 21", True),
        ("The capital is Paris.", "paris", True),
        ("Paris or Rome", "Paris", False),
        ("comparis", "Paris", False),
        ("So she sold 72.", "She sold 48/2 = <<48/2=24>>24. 48+24 = 72.\n#### 72", True),
        ("48 + 24 = 72\n#### 72", "#### 72", True),
        ("48 + 24 = 72\n#### 71", "#### 72", False),
        ("#### 72 (48 + 24)\nIs there anything else, 5?", "#### 72", True),
        ("It costs $1,200.", "#### 1,200", True),
        ("#### $1,200.00.", "... \n#### 1200\n", True),
        ("The loss is -$5.", "#### -5", True),
        ("It is 40%.", "#### 40", True),
        ("40", "#### 40%", True),
        ("#### nothing", "#### 40", False),
        (r"\boxed{1{,}200}", r"The total is $\boxed{\$1200}$.", True),
        (r"hence \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}", True),
        (r"hence \boxed{\frac{1}{3}}.", r"\boxed{\frac{1}{2}}", False),
        (r"\boxed{3} and \boxed{4", "3", True),
        ("It is \u22125.", "-5", True),
        ("It is -5.", "\u22125", True),
        ("It is \u22125.", "5", False),
        (r"\boxed{\text{Yes}}", "Yes", True),
        (r"\boxed{Yes}", r"$\boxed{\text{yes}}$", True),
        (r"\boxed{\text{No}}", "Yes", False),
        (r"\boxed{\mathrm{B}}", "B", True),
        (r"\boxed{12 \text{ cm}}", "12", True),
    ],
)
def test_a_completion_is_right_if_it_ends_with_the_answer(completion: str, answer: str, right: bool) -> None:
    assert is_right(completion, answer) == right


def plain_advantages(rewards: np.ndarray, scale: str) -> np.ndarray:
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    if scale == "none":
        return centered
    return centered / ((rewards.std(axis=1, ddof=1, keepdims=True) if scale == "group" else rewards.std(ddof=1)) + 1e-4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["group", "batch", "none"]),
)
def test_advantages_are_those_of_the_formula(rows: list[list[float]], scale: Any) -> None:
    found = advantages(torch.tensor(rows, dtype=torch.float64), scale).numpy()
    np.testing.assert_allclose(found, plain_advantages(np.array(rows), scale), rtol=1e-6, atol=1e-6)
    assert MIN_DEVIATION == 1e-4


def test_equal_rewards_have_advantages_of_exactly_zero() -> None:
    rewards = torch.tensor([[0.1] * 7, [0.0] * 6 + [1.0]], dtype=torch.float64)
    assert advantages(rewards, "group")[0].tolist() == [0.0] * 7
    assert advantages(rewards, "batch")[1].abs().min() > 0


@given(st.lists(st.sampled_from([0.0, 1.0, 0.25, -2.0]), min_size=2, max_size=40))
def test_an_evaluation_has_the_confidence_interval_of_the_mean_reward(rewards: list[float]) -> None:
    objective: Any = None
    evaluator, rewarded = GRPOEvaluator(objective, PromptExamples([], 1, 1)), [Rewarded([1], False, r) for r in rewards]
    found = evaluator.metrics(evaluator.sums(rewarded))
    half = 1.96 * np.std(rewards, ddof=1) / len(rewards) ** 0.5
    mean = np.mean(rewards)
    expected = wilson(mean, len(rewards)) if {*rewards} <= {0, 1} else [mean - half, mean + half]
    assert found["reward_interval"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("columns", "found", "column"),
    [
        ({"answer": "... #### 72"}, "... #### 72", "answer"),
        ({"ground_truth": "72"}, "72", "ground_truth"),
        ({"solution": r"$\boxed{72}$", "answer": ""}, r"$\boxed{72}$", "solution"),
        ({"solution": "a long way", "answer": 72}, 72, "answer"),
        ({"reward_model": {"style": "rule", "ground_truth": "72"}}, "72", "reward_model"),
        ({"reward_model": '{"style": "rule", "ground_truth": "72"}'}, "72", "reward_model"),
        ({"reward_model": "{'style': 'rule', 'ground_truth': 72}"}, 72, "reward_model"),
        ({"reward_model": "rule"}, None, None),
        ({"final_answer": "72"}, "72", "final_answer"),
        ({"reward_model": {"style": "rule"}, "other": 1}, None, None),
    ],
)
def test_the_right_answer_is_found_under_its_usual_names(columns: dict[str, Any], found: Any, column: Any) -> None:
    assert (right_answer(columns), answer_column(columns)) == (found, column)

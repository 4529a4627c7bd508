"""Reward functions of tests, with the signatures that users write."""

from __future__ import annotations

from typing import Any

LOW_IDS = 150  # token ids below this are rewarded; the tiny models have 1,024 token ids


def share_of_low_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Rewards tokens that an untrained tiny model hardly ever finds the most likely."""
    return [sum(token < LOW_IDS for token in ids) / len(ids) for ids in completion_ids]


def low_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Rewards tokens with low ids, so that nearly any change of a completion changes its reward."""
    return [-sum(ids) / len(ids) / 100 for ids in completion_ids]


def columns(prompts: list[Any], completions: list[Any], answer: list[str], number: list[int]) -> list[float]:
    """Checks its arguments."""
    assert len(prompts) == len(completions) == len(answer)
    for prompt, completion, place in zip(prompts, completions, number, strict=True):
        assert isinstance(prompt, list) == isinstance(completion, list) == bool(place % 2)
        text = completion[0]["content"] if isinstance(completion, list) else completion
        assert isinstance(text, str)
    return [float(one) for one in number]


def changing(prompts: list[Any], answer: list[str], number: list[int]) -> list[float]:
    """Changes its arguments."""
    rewards = [float(one) for one in number]
    for prompt in prompts:
        if isinstance(prompt, list):
            prompt.clear()
    answer.clear()
    number.clear()
    return rewards


def raising(completions: list[Any], **columns: Any) -> list[float]:
    raise KeyError("color")


def short(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0]


def missing(completions: list[Any], **columns: Any) -> list[float | None]:
    return [None for _ in completions]


def infinite(completions: list[Any], **columns: Any) -> list[float]:
    return [float("inf") for _ in completions]


def needing(completions: list[Any], solution: list[str]) -> list[float]:
    return [0.0 for _ in completions]


number = 3


def exiting(completions: list[Any], **columns: Any) -> list[float]:
    raise SystemExit(0)


def single(completions: list[Any], **columns: Any) -> float:
    return 0.5


def digits(completions: list[Any], **columns: Any) -> str:
    return "1" * len(completions)


def words(completions: list[Any], **columns: Any) -> list[str]:
    return ["1.0" for _ in completions]


def keyed(completions: list[Any], **columns: Any) -> dict[int, float]:
    return dict.fromkeys(range(len(completions)), 1.0)

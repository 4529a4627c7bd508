"""Reward functions of tests, with the signatures that users write."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

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


def huge(completions: list[Any], **columns: Any) -> list[float]:
    return [1e300 for _ in completions]


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


async def waiting(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The same rewards as `low_ids`, in the form that TRL also accepts."""
    await asyncio.sleep(0)
    return low_ids(completion_ids)


def meddling(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The same rewards as `low_ids`; changes all global state that training might depend on."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(len(completion_ids))
    random.seed(1)
    np.random.seed(1)
    os.chdir("/")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return low_ids(completion_ids)


async def exiting_later(completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    sys.exit(0)


def leaving(completions: list[Any], **columns: Any) -> list[float]:
    os._exit(0)


def leaving_in_a_thread(completions: list[Any], **columns: Any) -> list[float]:
    threading.Thread(target=os._exit, args=(0,)).start()
    time.sleep(60)
    return []


def constant(completions: list[Any], **columns: Any) -> list[float]:
    """Gives every completion the same reward, and starts a thread that never ends."""
    if threading.active_count() < 100 and "endless" not in {thread.name for thread in threading.enumerate()}:
        threading.Thread(target=time.sleep, args=(3600,), name="endless").start()
    return [0.25] * len(completions)

"""Generates completions of prompts with the current weights of a model, and rewards them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sansgpu.models.generation.generate import BatchModel, Completion, complete, stops_of
from sansgpu.models.generation.sampling import Sampling, reading
from sansgpu.models.generation.text import without_stop
from sansgpu.tasks.grpo.batch import PromptRow
from sansgpu.tasks.grpo.rewards import Reward

if TYPE_CHECKING:  # transformers takes seconds to import
    from sansgpu.models.huggingface.packed_forward import UnpaddedModel

SLOTS = 64  # completions that are generated together; more of them are hardly faster, and need more memory
TIMED_STEPS = 4  # decoding steps to time


@dataclass(frozen=True)
class Rewarded:
    """A completion: its tokens, including the one that ends it, and its reward."""

    ids: list[int]
    is_truncated: bool
    reward: float


class Rollout:
    """Completes prompts with at most `longest` tokens, and rewards the completions."""

    def __init__(self, unpadded: UnpaddedModel, tokenizer: Any, reward: Reward, longest: int) -> None:
        self._unpadded, self._tokenizer, self._reward, self._longest = unpadded, tokenizer, reward, longest

    def __call__(self, questions: Sequence[PromptRow], sampling: Sampling, first: int = 0) -> list[Rewarded]:
        """Completes each question. The random draws of a completion depend on the seed and its number from `first`."""
        if not questions:
            return []
        with reading(self._unpadded.model), torch.no_grad():
            model = batch_model(self._unpadded, self._tokenizer)
            found = self._completions(model, questions, sampling, first)
        texts = [without_stop(model.decode(one.ids), model.stops) for one in found]
        ids = [one.ids if one.stop is None else [*one.ids, one.stop] for one in found]
        rewards = self._reward(questions, texts, ids)
        truncated = [one.reason == "length" for one in found]
        return [Rewarded(*one) for one in zip(ids, truncated, rewards, strict=True)]

    def _completions(
        self, model: BatchModel, questions: Sequence[PromptRow], sampling: Sampling, first: int
    ) -> list[Completion]:
        prompts = [question.ids.tolist() for question in questions]
        reader = model.open_reader(min(SLOTS, len(prompts)), max(map(len, prompts)) + self._longest)
        limits = [self._longest] * len(prompts)
        stops = stops_of(model)
        done = {one.row: one for one in complete(reader, prompts, model.ends, limits, sampling, first, stops)}
        return [done[row] for row in range(first, first + len(prompts))]


def batch_model(unpadded: UnpaddedModel, tokenizer: Any) -> BatchModel:
    """Returns a model with its current weights, for generating text."""
    from sansgpu.models.huggingface.generation import pretrained_batch  # imports transformers

    # Whether the weights are packed must not depend on the available memory, because it changes how sums are rounded.
    return pretrained_batch(unpadded, tokenizer, may_fill_memory=True)


def generation_seconds(unpadded: UnpaddedModel, tokenizer: Any, completions: int, prompt: int, longest: int) -> float:
    """Estimates the time to generate completions of `longest` tokens for prompts of `prompt` tokens.

    Times reading the prompts and a few decoding steps in the middle of the completions.
    """
    with reading(unpadded.model), torch.no_grad():
        packing, model = _timed(lambda: batch_model(unpadded, tokenizer))
        slots, middle = min(SLOTS, completions) if model.together else 1, prompt + longest // 2
        middle = max(1, min(middle, model.context - TIMED_STEPS))
        reader = model.open_reader(slots, middle + TIMED_STEPS)
        read, _ = _timed(lambda: reader.add([[0] * middle] * slots))
        decoded, _ = _timed(lambda: [reader.step([0] * slots) for _ in range(TIMED_STEPS)])
    rounds = -(-completions // slots)
    seconds: float = packing + rounds * (read * prompt / middle + decoded / TIMED_STEPS * longest)
    return seconds


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result

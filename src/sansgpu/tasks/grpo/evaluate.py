"""Evaluates a model on prompts: the mean reward of its most likely completions, with a confidence interval."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from sansgpu.models.generation.sampling import Sampling
from sansgpu.tasks.evaluation import mean_interval, wilson
from sansgpu.tasks.grpo.batch import PromptRow, Prompts
from sansgpu.tasks.grpo.objective import GRPOObjective, completion_metrics, completion_sums
from sansgpu.tasks.grpo.rollout import SLOTS, Rewarded
from sansgpu.tasks.grpo.rows import PromptExamples
from sansgpu.tasks.grpo.settings import REWARD_INTERVAL
from sansgpu.tasks.task import Sums


class GRPOEvaluator:
    """Completes each prompt of a split once, always with the most likely token."""

    def __init__(self, objective: GRPOObjective, part: PromptExamples) -> None:
        self._objective, self._part = objective, part
        self._completed: list[tuple[PromptRow, Rewarded]] = []  # in the last evaluation

    @property
    def model(self) -> nn.Module:
        return self._objective.model

    def validation_batches(self, size: int) -> Iterator[Prompts]:
        """Yields batches of SLOTS prompts, which are completed together, whatever `size` is."""
        self._completed = []
        for start in range(0, len(self._part), SLOTS):
            yield Prompts(self._part.questions[start : start + SLOTS])

    def evaluate(self, batch: Prompts) -> Sums:
        rewarded = self._objective.rollout(batch.questions, Sampling(temperature=0.0))
        self._completed += zip(batch.questions, rewarded, strict=True)
        return self.sums(rewarded)

    def predicted_rows(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yields each prompt with its completion and the reward."""
        for prompt, one in self._completed:
            text, completion = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt.ids, one.ids))
            yield {"text": text, "predicted": completion, "reward": one.reward}

    def sums(self, rewarded: list[Rewarded]) -> Sums:
        """Returns sums for `metrics`."""
        squares, binary = sum(one.reward**2 for one in rewarded), sum(one.reward in (0, 1) for one in rewarded)
        return {**completion_sums(rewarded), "squares": squares, "binary": float(binary)}

    def metrics(self, sums: Sums) -> dict[str, Any]:
        found, count = completion_metrics(sums), sums["completions"]
        if sums["binary"] == count:
            found[REWARD_INTERVAL] = wilson(found["reward"], count)
        elif count > 1:
            found[REWARD_INTERVAL] = mean_interval(found["reward"], sums["squares"], count)
        return {"loss": 0.0 - found["reward"], **found, "prompts": count}

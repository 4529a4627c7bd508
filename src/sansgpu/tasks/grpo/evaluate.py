"""Evaluates a model on prompts: the mean reward of its most likely completions."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from sansgpu.models.generation.sampling import Sampling
from sansgpu.tasks.grpo.batch import Prompts
from sansgpu.tasks.grpo.objective import GRPOObjective, completion_metrics, completion_sums
from sansgpu.tasks.grpo.rollout import SLOTS
from sansgpu.tasks.grpo.rows import PromptExamples
from sansgpu.tasks.task import Sums


class GRPOEvaluator:
    """Completes each prompt of a split once, always with the most likely token."""

    def __init__(self, objective: GRPOObjective, part: PromptExamples) -> None:
        self._objective, self._part = objective, part

    @property
    def model(self) -> nn.Module:
        return self._objective.model

    def validation_batches(self, size: int) -> Iterator[Prompts]:
        """Yields batches of SLOTS prompts, which are completed together, whatever `size` is."""
        for start in range(0, len(self._part), SLOTS):
            yield Prompts(self._part.questions[start : start + SLOTS])

    def evaluate(self, batch: Prompts) -> Sums:
        return completion_sums(self._objective.rollout(batch.questions, Sampling(temperature=0.0)))

    def metrics(self, sums: Sums) -> dict[str, float]:
        found = completion_metrics(sums)
        return {"loss": 0.0 - found["reward"], **found, "prompts": sums["completions"]}

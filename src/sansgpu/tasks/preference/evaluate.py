"""Evaluates a model on preferences: accuracy, rewards and their margin."""

from __future__ import annotations

import numpy as np
import torch

from sansgpu.tasks.evaluation import SplitEvaluator
from sansgpu.tasks.preference.batch import ANSWERS, AnswerPairs, PreferenceExamples
from sansgpu.tasks.preference.losses import reward_metrics
from sansgpu.tasks.preference.objective import PreferenceObjective
from sansgpu.tasks.task import Sums


class PreferenceEvaluator(SplitEvaluator[PreferenceObjective, PreferenceExamples]):
    """Evaluates a model on held-out preferences."""

    def evaluate(self, batch: AnswerPairs) -> Sums:
        """Returns the log-probabilities by example number, because the KL divergence is a mean over all examples."""
        found = self._objective.log_probabilities(batch).tolist()
        rows = zip(batch.numbers.tolist(), found, strict=True)
        return {f"{number} {answer}": row[answer] for number, row in rows for answer in range(ANSWERS)}

    def metrics(self, sums: Sums) -> dict[str, float]:
        numbers = sorted({int(name.split()[0]) for name in sums})
        policy = torch.tensor(
            [[sums[f"{number} {answer}"] for answer in range(ANSWERS)] for number in numbers], dtype=torch.float64
        )
        loss, found = self._objective.measured(policy, self._part.batch(np.array(numbers)))
        return {"loss": float(loss) / len(numbers), **reward_metrics(found), "examples": len(numbers)}

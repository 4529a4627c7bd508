"""Objectives for causal models on preferences: pairs of a chosen and a rejected answer, or rated answers (KTO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE
from sansgpu.models.huggingface.costs import PretrainedCosts
from sansgpu.tasks.fine_tuning import FineTuning
from sansgpu.tasks.kept_activations import TokenSequences
from sansgpu.tasks.preference.batch import ANSWERS, AnswerPairs
from sansgpu.tasks.preference.losses import Scores, kl_divergence, kto_losses, pair_losses, reward_metrics
from sansgpu.tasks.preference.sequences import AnswerSequences
from sansgpu.tasks.preference.settings import PreferenceTrainingConfig
from sansgpu.tasks.task import StepSums, Sums


class PreferenceObjective(FineTuning):
    """A causal model and its loss on pairs of answers."""

    head_type = "causal"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.preference = PreferenceTrainingConfig.of(self.config).preference
        self._step_sums = StepSums()

    @staticmethod
    def sequences(batch: Any) -> TokenSequences:
        answers = AnswerSequences.of(batch.sizes)
        return TokenSequences(batch.tokens[answers.tokens], answers.lengths)

    def log_probabilities(self, batch: AnswerPairs) -> torch.Tensor:
        """Returns the log-probability of each answer, (B, 2) fp64, summed over its targets that are learned."""
        sequences, has_target = AnswerSequences.of(batch.sizes), batch.targets != IGNORE
        states = self.unpadded.head_inputs(batch.tokens[sequences.tokens], sequences.lengths)
        inputs = states[sequences.predicting[has_target]]
        # Losses subtract large sums that are close.
        found = self.unpadded.target_log_probabilities(inputs, batch.targets[has_target]).double()
        return found.new_zeros(2 * len(batch)).index_add(0, sequences.answers[has_target], found).view(-1, 2)

    def summed_loss(self, batch: Any) -> torch.Tensor:
        loss, sums = self.measured(self.log_probabilities(batch), batch)
        self._step_sums.add(sums)
        return loss

    def measured(self, policy: torch.Tensor, batch: AnswerPairs) -> tuple[torch.Tensor, Sums]:
        """Returns the summed loss, and sums for metrics, given the log-probabilities `policy` (B, 2)."""
        known = batch.has_target()
        scores = _scores(policy, batch, known)
        losses, rewards = pair_losses(self.preference, scores)
        chosen, rejected = rewards.detach().double().unbind(1)
        count = float(len(rewards))
        sums = {
            "examples": count, "accuracy": float((chosen > rejected).sum()),
            "chosen": float(chosen.sum()), "rejected": float(rejected.sum()), "rated_good": count, "rated_bad": count,
        }  # fmt: skip
        if self.preference.loss == "orpo":
            sums["nll"] = -float((scores.policy / scores.tokens.clamp(min=1))[:, 0].detach().double().sum())
        return losses.sum(), sums

    def step_sums(self) -> Sums:
        return {**super().step_sums(), **self._step_sums.take()}

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return {**super().step_metrics(sums), **reward_metrics(sums)}

    @classmethod
    def costs(cls, config: Config) -> PretrainedCosts:
        return replace(super().costs(config), window=ANSWERS * config.window)


class KTOObjective(PreferenceObjective):
    """A causal model and the KTO loss on rated answers. Estimates the KL divergence from all examples of a step."""

    def outputs(self, batch: AnswerPairs) -> torch.Tensor:
        with self.forward_pass():
            return self.log_probabilities(batch)

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[AnswerPairs]) -> torch.Tensor:
        loss, sums = self.measured(outputs, AnswerPairs.joined(batches))
        # Every rank adds the sums of the whole step, so the totals over ranks are world_size times too large. Metrics
        # are correct, because they are ratios of totals.
        self._step_sums.add(sums)
        return loss

    def measured(self, policy: torch.Tensor, batch: AnswerPairs) -> tuple[torch.Tensor, Sums]:
        known = batch.has_target()
        scores, is_good = _scores(policy, batch, known), batch.labels[known] == 1
        kl = kl_divergence(scores)
        losses, rewards = kto_losses(self.preference, scores, is_good, kl)
        right = (rewards > self.preference.scale * kl) == is_good
        rewards = rewards.detach().double()
        return losses.sum(), {
            "examples": float(len(rewards)), "accuracy": float(right.sum()), "kl": float(kl) * len(rewards),
            "chosen": float(rewards[is_good].sum()), "rejected": float(rewards[~is_good].sum()),
            "rated_good": float(is_good.sum()), "rated_bad": float((~is_good).sum()),
        }  # fmt: skip


def _scores(policy: torch.Tensor, batch: AnswerPairs, known: torch.Tensor) -> Scores:
    return Scores(policy[known], batch.reference[known], batch.target_tokens()[known])

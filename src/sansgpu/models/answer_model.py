"""Computes log-probabilities of answers. A prompt with two answers runs once, except in attention.

B examples, N input tokens, K target tokens; models.pair_layout has the places of the tokens.
"""

from __future__ import annotations

from functools import cached_property

import torch

from sansgpu.kernels.cross_entropy import target_log_probabilities
from sansgpu.models.generate import reading
from sansgpu.models.pair_layout import PairLayout
from sansgpu.models.probes import autocast_of, close_outputs
from sansgpu.models.quantized_layers import matrix_of
from sansgpu.models.unpadded import UnpaddedModel


class AnswerModel:
    """A causal model of transformers that rates answers."""

    def __init__(self, unpadded: UnpaddedModel) -> None:
        self._unpadded = unpadded

    def log_probabilities(self, tokens: torch.Tensor, sizes: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the log-probability of each answer, (B, 2) fp64, summed over its targets but -100.

        `tokens` (N,) are B prompts with two answers each, `sizes` (B, 3) their numbers of tokens, and `targets` (K,)
        the tokens of the answers.
        """
        layout = PairLayout.of(sizes)
        has_target = targets != -100
        places, answers = layout.predicting[has_target], layout.answers[has_target]
        if self.shares_prompts:
            inputs = self._shared(tokens, layout)[layout.copies[places]]
        else:
            inputs = self._separate(tokens, layout)[places]
        found = self._of_targets(inputs, targets[has_target]).double()  # a loss compares sums of many, which are close
        return found.new_zeros(len(layout.lengths)).index_add(0, answers, found).view(-1, 2)

    def _shared(self, tokens: torch.Tensor, layout: PairLayout) -> torch.Tensor:
        """Returns the head's input of each of the N tokens."""
        inputs = self._unpadded.packed_inputs(tokens[None], layout.positions[None], layout)
        return self._unpadded.before_head(inputs)[0]

    def _separate(self, tokens: torch.Tensor, layout: PairLayout) -> torch.Tensor:
        """Returns the head's input of each token, with a prompt for each answer."""
        return self._unpadded.head_inputs(tokens[layout.copies], layout.lengths)

    def _of_targets(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head = self._unpadded.head
        if head is not None:
            return target_log_probabilities(inputs, matrix_of(head), targets, self._unpadded.softcap)
        return torch.log_softmax(inputs.float(), dim=1).gather(1, targets[:, None])[:, 0]

    @cached_property
    def shares_prompts(self) -> bool:
        """True if both answers can share their prompt, with the same results."""
        if not self._unpadded.has_plain_rows:
            return False
        model = self._unpadded.model
        sizes = torch.tensor([[7, 5, 9], [3, 2, 4]], device=model.device)
        layout = PairLayout.of(sizes)
        vocabulary = int(model.config.get_text_config().vocab_size)
        tokens = torch.arange(len(layout.positions), device=model.device) * 7 % vocabulary
        with reading(model), torch.no_grad(), autocast_of(model):
            separate = self._separate(tokens, layout)[layout.originals]
            return close_outputs(model, self._shared(tokens, layout), separate)

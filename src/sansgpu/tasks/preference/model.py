"""Computes the log-probabilities of answers. Two answers share the computation of their prompt, except in attention.

B examples, N input tokens, K target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sansgpu.kernels.attention import AttentionKernel, causal_ranges
from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.probes import autocast_of, close_outputs


@dataclass(frozen=True)
class PairLayout:
    """Indices that map between two layouts of B examples.

    The shared layout has N tokens: prompt, first answer, second answer. The separate layout has M tokens: a sequence of
    prompt and answer for each of the 2B answers.
    """

    positions: torch.Tensor  # (N,): position id of each shared token
    copies: torch.Tensor  # (M,): index of the shared token that each separate token copies
    lengths: torch.Tensor  # (2B,): length of each separate sequence
    originals: torch.Tensor  # (N,): index of a separate token that copies each shared token
    second_prompts: torch.Tensor  # (S,): indices of the separate tokens in the prompts of second answers
    predicting: torch.Tensor  # (K,): index of the separate token that predicts each target
    answers: torch.Tensor  # (K,): number of each target's answer, from 0 to 2B - 1
    ranges: torch.Tensor  # (1, M, 2): key range of each separate token

    @classmethod
    def of(cls, sizes: torch.Tensor) -> PairLayout:
        prompt, first, second = sizes.unbind(1)
        more = torch.stack((first, second), dim=1) - 1  # (B, 2): input tokens of each answer: all but the last
        shared, lengths = _starts(prompt + more.sum(1)), prompt[:, None] + more
        begins = _starts(lengths.flatten()).view(-1, 2)
        after = shared + prompt
        segments = torch.stack((shared, after, shared, after + more[:, 0]), dim=1)
        counts = torch.stack((prompt, more[:, 0], prompt, more[:, 1]), dim=1)
        of_answers = torch.stack((first, second), dim=1)
        numbers = torch.arange(2 * len(sizes), device=sizes.device)
        return cls(
            _ranges(
                torch.stack((torch.zeros_like(prompt), prompt, prompt), dim=1),
                torch.stack((prompt, more[:, 0], more[:, 1]), dim=1),
            ),
            _ranges(segments, counts),
            lengths.flatten(),
            _ranges(
                torch.stack((begins[:, 0], begins[:, 1] + prompt), dim=1),
                torch.stack((lengths[:, 0], more[:, 1]), dim=1),
            ),
            _ranges(begins[:, 1], prompt),
            _ranges(begins + prompt[:, None] - 1, of_answers),
            torch.repeat_interleave(numbers, of_answers.flatten()),
            causal_ranges(torch.repeat_interleave(numbers, lengths.flatten())[None]),
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel) -> torch.Tensor:
        """Computes attention in the separate layout, from q (1, H, N, d), k and v (1, K, N, d) in the shared one."""
        q, k, v = (_Expand.apply(values, 2, self) for values in (q, k, v))
        contracted: torch.Tensor = _Contract.apply(kernel(q, k, v, self.ranges).transpose(1, 2), 1, self)
        return contracted.transpose(1, 2)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def _ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Concatenates the integers of all ranges [start, start + count), row by row."""
    starts, counts = starts.flatten(), counts.flatten()
    return torch.repeat_interleave(starts - _starts(counts), counts) + torch.arange(
        int(counts.sum()), device=counts.device
    )


class _Expand(torch.autograd.Function):
    """Copies tokens along a dimension. The backward pass sums the gradients of a token's copies in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dim: int, layout: PairLayout) -> torch.Tensor:
        ctx.dim, ctx.layout = dim, layout
        return values.index_select(dim, layout.copies)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), dim, layout = grad_outputs, ctx.dim, ctx.layout
        total = gradient.index_select(dim, layout.originals)
        prompts = layout.copies[layout.second_prompts]
        second = gradient.index_select(dim, layout.second_prompts)
        return total.index_copy_(dim, prompts, second.add_(total.index_select(dim, prompts))), None, None


class _Contract(torch.autograd.Function):
    """Selects one copy of each token along a dimension. In the backward pass only this copy gets a gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dim: int, layout: PairLayout) -> torch.Tensor:
        ctx.dim, ctx.layout, ctx.shape = dim, layout, values.shape
        return values.index_select(dim, layout.originals)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = grad_outputs[0]
        return gradient.new_zeros(ctx.shape).index_copy_(ctx.dim, ctx.layout.originals, gradient), None, None


class AnswerModel:
    """Computes log-probabilities of answers with a causal model of transformers."""

    def __init__(self, unpadded: UnpaddedModel) -> None:
        self._unpadded = unpadded

    def log_probabilities(self, tokens: torch.Tensor, sizes: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the log-probability of each answer, (B, 2) fp64, summed over its targets other than -100.

        The arguments are those fields of `AnswerPairs`: `tokens` (N,), `sizes` (B, 3) and `targets` (K,).
        """
        layout = PairLayout.of(sizes)
        has_target = targets != -100
        places, answers = layout.predicting[has_target], layout.answers[has_target]
        if self.shares_prompts:
            inputs = self._shared(tokens, layout)[layout.copies[places]]
        else:
            inputs = self._separate(tokens, layout)[places]
        found = self._unpadded.target_log_probabilities(
            inputs, targets[has_target]
        ).double()  # losses subtract large sums that are close
        return found.new_zeros(len(layout.lengths)).index_add(0, answers, found).view(-1, 2)

    def _shared(self, tokens: torch.Tensor, layout: PairLayout) -> torch.Tensor:
        """Returns the head's inputs in the shared layout: (N, ...)."""
        inputs = self._unpadded.packed_inputs(tokens[None], layout.positions[None], layout)
        return self._unpadded.before_head(inputs)[0]

    def _separate(self, tokens: torch.Tensor, layout: PairLayout) -> torch.Tensor:
        """Returns the head's inputs in the separate layout: (M, ...)."""
        return self._unpadded.head_inputs(tokens[layout.copies], layout.lengths)

    @cached_property
    def shares_prompts(self) -> bool:
        """True if a trial shows that the model gives the same results with shared prompts."""
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

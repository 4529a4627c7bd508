"""Places the tokens of prompts with two answers each, so that all layers but attention compute each prompt once.

B examples, N input tokens, M input tokens if each answer has a prompt of its own, K target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sansgpu.kernels.attention import causal_ranges
from sansgpu.models.packed_mask import Kernel


@dataclass(frozen=True)
class PairLayout:
    """Where the tokens of B examples are, with a shared prompt and with a prompt for each answer."""

    positions: torch.Tensor  # (N,): of each token in its sequence
    copies: torch.Tensor  # (M,): the token of which each one in the sequences of single answers is a copy
    lengths: torch.Tensor  # (2B,): tokens of the sequence of each answer
    originals: torch.Tensor  # (N,): a copy of each token
    second_prompts: torch.Tensor  # (S,): copies that are the prompt of a second answer
    predicting: torch.Tensor  # (K,): the copy after which each target follows
    answers: torch.Tensor  # (K,): the answer of each target, from 0 to 2B - 1
    ranges: torch.Tensor  # (1, M, 2): the keys that each token of the sequences of single answers sees

    @classmethod
    def of(cls, sizes: torch.Tensor) -> PairLayout:
        prompt, first, second = sizes.unbind(1)
        more = torch.stack((first, second), dim=1) - 1  # (B, 2): inputs of each answer, all but its last token
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

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """Computes attention with a prompt for each answer; q (1, H, N, d), k and v (1, K, N, d)."""
        q, k, v = (_Expand.apply(values, 2, self) for values in (q, k, v))
        contracted: torch.Tensor = _Contract.apply(kernel(q, k, v, self.ranges).transpose(1, 2), 1, self)
        return contracted.transpose(1, 2)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def _ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Concatenates the ranges [start, start + count) of equally shaped tensors, row by row."""
    starts, counts = starts.flatten(), counts.flatten()
    return torch.repeat_interleave(starts - _starts(counts), counts) + torch.arange(
        int(counts.sum()), device=counts.device
    )


class _Expand(torch.autograd.Function):
    """Copies tokens along a dimension. The gradient of each token is the sum over its copies, in a fixed order."""

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
    """Keeps one copy of each token along a dimension, which gets the token's gradient; the others get none."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dim: int, layout: PairLayout) -> torch.Tensor:
        ctx.dim, ctx.layout, ctx.shape = dim, layout, values.shape
        return values.index_select(dim, layout.originals)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = grad_outputs[0]
        return gradient.new_zeros(ctx.shape).index_copy_(ctx.dim, ctx.layout.originals, gradient), None, None

"""The sequences of prompts with each of their answers, of which a model computes the log-probabilities.

B examples, N input tokens of examples, M tokens of sequences, K target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AnswerSequences:
    """Where the tokens and targets of B examples are in 2B sequences, each of a prompt and one of its answers."""

    tokens: torch.Tensor  # (M,): index of each token among the tokens of the examples: prompt, first, second answer
    lengths: torch.Tensor  # (2B,): tokens of each sequence
    predicting: torch.Tensor  # (K,): index of the sequences' token that predicts each target
    answers: torch.Tensor  # (K,): number of each target's answer, from 0 to 2B - 1

    @classmethod
    def of(cls, sizes: torch.Tensor) -> AnswerSequences:
        """Builds them from the numbers of tokens (B, 3) of each prompt, first and second answer."""
        prompt, of_answers = sizes[:, :1], sizes[:, 1:]
        inputs = of_answers - 1  # the last token of an answer is only a target
        starts = _starts((prompt + inputs.sum(1, keepdim=True)).flatten())[:, None]
        first_inputs = starts + prompt + torch.stack((torch.zeros_like(inputs[:, 0]), inputs[:, 0]), dim=1)
        segments = torch.stack((starts.expand_as(first_inputs), first_inputs), dim=2)
        lengths = prompt + inputs
        begins = _starts(lengths.flatten()).view(-1, 2)
        return cls(
            _ranges(segments, torch.stack((prompt.expand_as(inputs), inputs), dim=2)),
            lengths.flatten(),
            _ranges(begins + prompt - 1, of_answers),
            torch.repeat_interleave(of_answers.flatten()),
        )


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def _ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Concatenates the integers of all ranges [start, start + count), row by row."""
    starts, counts = starts.flatten(), counts.flatten()
    places = torch.arange(int(counts.sum()), device=counts.device)
    return torch.repeat_interleave(starts - _starts(counts), counts) + places

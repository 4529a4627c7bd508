"""Computes the log-probabilities of given tokens with a causal model, for many sequences at once.

N tokens of all sequences, M in the row in which they share beginnings, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from sansgpu.kernels.block_quantization import Matrix
from sansgpu.kernels.cross_entropy import LossOptions
from sansgpu.kernels.log_probabilities import log_probabilities_and_hits
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.modules import integer_of_model
from sansgpu.models.shared_prefixes import SharedPrefixes, common_length

PASS_TOKENS = 2048  # tokens per forward pass, except for longer sequences: enough for full speed, with bounded memory


# Computes the head's inputs (M, D), or logits (M, V) without a head, of a row in which `tokens` (N,) share beginnings.
States = Callable[[torch.Tensor, SharedPrefixes], torch.Tensor]


class ScoreRequest(NamedTuple):
    """A sequence whose last `targets` tokens are scored; at least the first token is not."""

    tokens: list[int]
    targets: int


class Score(NamedTuple):
    """The result of a request."""

    log_probability: float  # the sum over the targets
    is_greedy: bool  # whether each target is the most likely token


@dataclass(frozen=True)
class Scorer:
    """A causal model with what scoring needs."""

    model: nn.Module
    states: States
    head: Matrix | None
    context: int | None  # maximum number of tokens, if known
    shares: bool = True  # whether sequences can share the computation of their common beginning
    softcap: float = 0.0

    def scores(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[int, Score]]:
        """Yields the number and the score of each request, in the order in which they are computed."""
        for numbers in self._passes(requests):
            chosen = [requests[number] for number in numbers]
            tokens = torch.tensor([token for one in chosen for token in one.tokens[:-1]])
            lengths = torch.tensor([len(one.tokens) - 1 for one in chosen])
            row = SharedPrefixes.of(tokens, lengths, self.shares)
            parts = zip(row.copies.split(lengths.tolist()), chosen, strict=True)
            places = torch.cat([copies[-one.targets :] for copies, one in parts])
            targets = torch.tensor([token for one in chosen for token in one.tokens[-one.targets :]])
            with torch.inference_mode():
                found, hits = self._of_targets(self.states(tokens, row)[places], targets)
            sizes = [one.targets for one in chosen]
            for number, values, is_hit in zip(numbers, found.double().split(sizes), hits.split(sizes), strict=True):
                yield number, Score(float(values.sum()), bool(is_hit.all()))

    def _passes(self, requests: Sequence[ScoreRequest]) -> Iterator[list[int]]:
        """Yields the numbers of the requests of each forward pass."""
        numbers, total, last = list[int](), 0, list[int]()
        for number in sorted(range(len(requests)), key=lambda number: requests[number].tokens):
            inputs = requests[number].tokens[:-1]
            new = len(inputs) - (common_length(last, inputs) if numbers and self.shares else 0)
            if numbers and total + new > PASS_TOKENS:
                yield numbers
                numbers, total, new = [], 0, len(inputs)
            numbers.append(number)
            total, last = total + new, inputs
        if numbers:
            yield numbers

    def _of_targets(self, rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probability of each target, and whether it is the most likely token."""
        if self.head is None:
            log_probabilities = torch.log_softmax(rows.float(), dim=1)
            found = log_probabilities.gather(1, targets[:, None])[:, 0]
            return found, log_probabilities.argmax(dim=1) == targets
        options = LossOptions(softcap=self.softcap, integer=integer_of_model(self.model))
        return log_probabilities_and_hits(rows, self.head, targets, options)


def decoder_scorer(model: TransformerLM) -> Scorer:
    def states(tokens: torch.Tensor, row: SharedPrefixes) -> torch.Tensor:
        ids, positions = tokens[row.originals], row.positions
        if not shares:
            return model.hidden(ids[None], positions[None], (positions == 0).cumsum(0)[None])[0]
        return model.hidden(ids[None], positions[None], caches=[row] * len(model.blocks))[0]

    shares = not model.config.has_states  # a recurrent state cannot be shared like keys and values
    return Scorer(model, states, model.head_matrix, model.config.max_seq_len, shares)

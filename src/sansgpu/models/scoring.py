"""Computes the log-probabilities of given tokens with a causal model, for many sequences at once.

N tokens in a row, M targets, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from sansgpu.kernels.block_quantization import Matrix
from sansgpu.kernels.cross_entropy import LossOptions, log_probabilities_and_hits
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.modules import multiplies_integers
from sansgpu.models.prefix_tree import PrefixTree

PASS_TOKENS = 2048  # tokens per forward pass, except for longer sequences: enough for full speed, with bounded memory


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
    states: Callable[[PrefixTree], torch.Tensor]  # head inputs (N, D), or logits (N, V) if `head` is None
    head: Matrix | None
    context: int | None  # maximum number of tokens, if known
    shares: bool = True  # whether sequences can share the computation of their common beginning
    softcap: float = 0.0

    def scores(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[int, Score]]:
        """Yields the number and the score of each request, in the order in which they are computed."""
        for tree, numbers in self._passes(requests):
            chosen = [requests[number] for number in numbers]
            places = [place for one, path in zip(chosen, tree.paths, strict=True) for place in path[-one.targets :]]
            targets = torch.tensor([token for one in chosen for token in one.tokens[-one.targets :]])
            with torch.inference_mode():
                found, hits = self._of_targets(self.states(tree)[torch.tensor(places)], targets)
            sizes = [one.targets for one in chosen]
            parts = zip(found.double().split(sizes), hits.split(sizes), strict=True)
            for number, (values, is_hit) in zip(numbers, parts, strict=True):
                yield number, Score(float(values.sum()), bool(is_hit.all()))

    def _passes(self, requests: Sequence[ScoreRequest]) -> Iterator[tuple[PrefixTree, list[int]]]:
        """Yields the input tokens of each forward pass, with the numbers of their requests."""
        tree, numbers = PrefixTree(self.shares), list[int]()
        for number in sorted(range(len(requests)), key=lambda number: requests[number].tokens):
            inputs = requests[number].tokens[:-1]
            if numbers and len(tree) + tree.new_tokens(inputs) > PASS_TOKENS:
                yield tree, numbers
                tree, numbers = PrefixTree(self.shares), []
            tree.add(inputs)
            numbers.append(number)
        if numbers:
            yield tree, numbers

    def _of_targets(self, rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probability of each target (M,), and whether it is the most likely token (M,)."""
        if self.head is None:
            log_probabilities = torch.log_softmax(rows.float(), dim=1)
            found = log_probabilities.gather(1, targets[:, None])[:, 0]
            return found, log_probabilities.argmax(dim=1) == targets
        options = LossOptions(softcap=self.softcap, integer=multiplies_integers(self.model))
        return log_probabilities_and_hits(rows, self.head, targets, options)


def decoder_scorer(model: TransformerLM) -> Scorer:
    def states(tree: PrefixTree) -> torch.Tensor:
        tokens, positions = tree.inputs()
        return model.hidden(tokens[None], positions[None], caches=[tree] * len(model.blocks))[0]

    return Scorer(model, states, model.head_matrix, model.config.max_seq_len)

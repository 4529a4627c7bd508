"""A batch of sequences that may join and leave before each token (continuous batching).

The random draws of a sequence come from its own generator, and its arithmetic does not depend on other sequences. So
its tokens do not depend on what else is in the batch.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from sansgpu.models.generation.sampling import Sampling, sample_tokens


class BatchReader(Protocol):
    """A language model with a cache for several sequences, which are in the order in which they were added."""

    @property
    def slots(self) -> int:
        """Maximum number of sequences."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the cached keys and values per token; known after the first forward pass."""

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the recurrent states of a sequence, whatever its length; known after the first forward pass."""

    def add(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        """Adds B sequences; returns the logits (B, V) of their next tokens."""

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends a token to each sequence; returns the logits (B, V) of their next tokens."""

    def keep(self, kept: Sequence[int]) -> None:
        """Removes all sequences except those with the indices `kept`, which must be ascending."""

    def reset(self) -> None:
        """Removes all sequences, whose cache may be incomplete after a failed pass."""


class ScoredToken(NamedTuple):
    """A generated token with its log-probability, and the most likely tokens in its place with theirs."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Continuation:
    """The tokens generated so far for a prompt. Its `draws` replace the seed in `sampling`.

    `alternatives` is the number of most likely tokens to record in `scores` for each generated token; None: no scores.
    """

    prompt: list[int]
    limit: int  # maximum tokens to generate, at least 1
    sampling: Sampling
    draws: torch.Generator
    alternatives: int | None = None
    scores: list[ScoredToken] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    stop: int | None = None  # the token with which the model ended the text
    ended: str | None = None  # "stop": the model ended the text; "length": `limit`; the owner may set other reasons

    def add(self, token: int, ends: Container[int]) -> None:
        """Appends a token, or ends the sequence without it if it is one of `ends`."""
        if token in ends:
            self.stop, self.ended = token, "stop"
            return
        self.ids.append(token)
        if len(self.ids) == self.limit:
            self.ended = "length"


class RunningBatch:
    """The sequences that a model is generating."""

    def __init__(self, reader: BatchReader, ends: Container[int]) -> None:
        self._reader, self._ends = reader, ends
        self.active: list[Continuation] = []

    @property
    def free(self) -> int:
        """The number of sequences that may join."""
        return self._reader.slots - sum(one.ended is None for one in self.active)

    def step(self, joining: Sequence[Continuation] = ()) -> None:
        """Removes the sequences that have ended, adds `joining`, and generates a token for each sequence."""
        self._remove_ended()
        logits = [self._reader.step([one.ids[-1] for one in self.active])] if self.active else []
        if joining:
            logits.append(self._reader.add([one.prompt for one in joining]))
            self.active += joining
        if self.active:
            rows = torch.cat(logits)
            for one, token, row in zip(self.active, _sample(rows, self.active), rows, strict=True):
                if one.alternatives is not None and token not in self._ends:
                    one.scores.append(_scored(row, token, one.alternatives))
                one.add(token, self._ends)

    def _remove_ended(self) -> None:
        kept = [index for index, one in enumerate(self.active) if one.ended is None]
        if len(kept) < len(self.active):
            self._reader.keep(kept)
            self.active = [self.active[index] for index in kept]

    def clear(self) -> None:
        """Removes all sequences, e.g. after a failed step."""
        self._reader.reset()
        self.active = []


def _scored(logits: torch.Tensor, token: int, alternatives: int) -> ScoredToken:
    """Scores a token by the model's own distribution, before temperature and other sampling options."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(alternatives, len(logprobs)))
    return ScoredToken(token, float(logprobs[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def _sample(logits: torch.Tensor, sequences: Sequence[Continuation]) -> list[int]:
    """Samples a token from each row of logits (B, V), those with the same options together."""
    groups: dict[Sampling, list[int]] = {}
    for index, one in enumerate(sequences):
        groups.setdefault(replace(one.sampling, seed=0), []).append(index)
    tokens = [0] * len(sequences)
    for sampling, members in groups.items():
        rows = logits if len(groups) == 1 else logits[members]
        sampled = sample_tokens(rows, sampling, [sequences[index].draws for index in members])
        for index, token in zip(members, sampled, strict=True):
            tokens[index] = token
    return tokens

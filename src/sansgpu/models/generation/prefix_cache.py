"""Keeps the keys and values of finished sequences, for prompts that begin with the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sansgpu.models.generation.kv_cache import SlotCache
from sansgpu.models.shared_prefixes import common_length

# Tokens. For a shorter common prefix, dividing prompts into two passes takes longer than computing it several times.
MIN_SHARED = 64


@dataclass(frozen=True, eq=False)
class _StoredSequence:
    """A sequence: its tokens, and its keys and values, one pair of tensors per layer."""

    tokens: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class PrefixCache:
    """The most recently finished sequences, of at most `max_tokens` tokens together."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._finished: deque[_StoredSequence] = deque()  # the oldest first

    def store(self, tokens: Sequence[int], cache: SlotCache, slot: int) -> None:
        """Copies a sequence from its slot. Removes its stored prefixes, and the oldest sequences beyond the limit."""
        ids = list(tokens[: int(cache.lengths[slot])])
        if not MIN_SHARED <= len(ids) <= self._max_tokens or self._longest(ids)[0] == len(ids):
            return
        self._finished = deque(one for one in self._finished if common_length(one.tokens, ids) < len(one.tokens))
        self._finished.append(_StoredSequence(ids, cache.copy_of(slot, len(ids))))
        while sum(len(one.tokens) for one in self._finished) > self._max_tokens:
            self._finished.popleft()

    def find(self, prompt: Sequence[int]) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns the length of the longest stored prefix of a prompt, or 0, and what `SlotCache.restore` needs."""
        shared, found = self._longest(prompt)
        if found is None or shared < MIN_SHARED:
            return 0, []
        self._finished.remove(found)
        self._finished.append(found)  # now the most recent one
        return shared, found.layers

    def _longest(self, ids: Sequence[int]) -> tuple[int, _StoredSequence | None]:
        """Returns the sequence with the longest common prefix, and the length of that prefix."""
        best: tuple[int, _StoredSequence | None] = (0, None)
        for one in self._finished:
            if (shared := common_length(one.tokens, ids)) > best[0]:
                best = shared, one
        return best

"""Restricts generated text to quotes: spans of a passage that begin and end at the edges of words.

B sequences, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from sansgpu.models.generation.batch import BatchReader

# A word with the marks inside and around it that belong to it, such as in 3.5, don't, $20 or 7%. From U+3000 on, each
# character is a word, because Chinese and Japanese have no spaces.
_WORD = re.compile(r"[$€£]?[^\W\u3000-\U0010ffff]+(?:[.,:'’/-][^\W\u3000-\U0010ffff]+)*%?|(?=\w)[\u3000-\U0010ffff]")

Encoded = tuple[Sequence[int], Sequence[tuple[int, int]]]  # tokens of a text, and the characters of each
Encode = Callable[[list[str]], Sequence[Encoded]]


class _Candidate(NamedTuple):
    """The longest quote that begins at a character of the passage.

    `ends` has, for each token, the character after it if a word ends there, otherwise None.
    """

    start: int
    ids: Sequence[int]
    ends: Sequence[int | None]


class Quotes:
    """All quotes of up to `max_words` words from a passage, in the tokens that the tokenizer gives each of them."""

    def __init__(self, passage: str, encode: Encode, max_words: int) -> None:
        words = [match.span() for match in _WORD.finditer(passage)]
        last = [words[min(number + max_words, len(words)) - 1][1] for number in range(len(words))]
        texts = [passage[start:end] for (start, _), end in zip(words, last, strict=True)]
        ends = {end for _, end in words}
        self.candidates = [
            _Candidate(start, ids, [end if end in ends else None for end in _ends(start, spans)])
            for (start, _), (ids, spans) in zip(words, encode(texts) if texts else [], strict=True)
        ]
        self.max_tokens = max((len(one.ids) for one in self.candidates), default=0)

    def find(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Returns the start and end character of the first quote with these tokens, or None."""
        for one in self.candidates:
            if ids and list(one.ids[: len(ids)]) == list(ids) and (end := one.ends[len(ids) - 1]) is not None:
                return one.start, end
        return None


def _ends(start: int, spans: Sequence[tuple[int, int]]) -> list[int | None]:
    """Returns the end of each token in the passage, or None if the next token continues its last character."""
    ends: list[int | None] = [
        start + span[1] if following[0] >= span[1] else None for span, following in pairwise(spans)
    ]
    return [*ends, start + spans[-1][1]] if spans else []


class _Quoting:
    """A quote that is being generated."""

    def __init__(self, quotes: Quotes, ends: Collection[int]) -> None:
        self._candidates, self._ends, self._count = quotes.candidates, ends, 0

    def advance(self, token: int) -> None:
        count = self._count
        self._candidates = [one for one in self._candidates if len(one.ids) > count and one.ids[count] == token]
        self._count += 1

    def allowed(self) -> list[int]:
        """Returns the tokens that may come next: only end tokens if no quote goes on."""
        found = {one.ids[self._count] for one in self._candidates if len(one.ids) > self._count}
        may_end = self._count and any(one.ends[self._count - 1] is not None for one in self._candidates)
        return sorted({*found, *(self._ends if may_end or not found else ())})


class QuotingReader:
    """A BatchReader that allows only tokens that continue a quote, and after a whole one those that end the text.

    `quotes` are those of each prompt, and `ends` the model's end tokens.
    """

    def __init__(self, reader: BatchReader, quotes: Mapping[tuple[int, ...], Quotes], ends: Collection[int]) -> None:
        self._reader, self._quotes, self._ends = reader, quotes, ends
        self._quoting: list[_Quoting] = []

    @property
    def slots(self) -> int:
        return self._reader.slots

    @property
    def token_bytes(self) -> int:
        return self._reader.token_bytes

    @property
    def sequence_bytes(self) -> int:
        return self._reader.sequence_bytes

    def add(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        added = [_Quoting(self._quotes[tuple(prompt)], self._ends) for prompt in prompts]
        self._quoting += added
        return _restricted(self._reader.add(prompts), added)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        for quoting, token in zip(self._quoting, tokens, strict=True):
            quoting.advance(token)
        return _restricted(self._reader.step(tokens), self._quoting)

    def keep(self, kept: Sequence[int]) -> None:
        self._reader.keep(kept)
        self._quoting = [self._quoting[index] for index in kept]

    def reset(self) -> None:
        self._reader.reset()
        self._quoting = []


def _restricted(logits: torch.Tensor, quoting: Sequence[_Quoting]) -> torch.Tensor:
    """Returns logits (B, V) that are -inf except at the allowed tokens."""
    restricted = torch.full_like(logits, -torch.inf)
    for row, one in enumerate(quoting):
        allowed = one.allowed()
        restricted[row, allowed] = logits[row, allowed]
    return restricted

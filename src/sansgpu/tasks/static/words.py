"""Tokenizes many short texts fast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain

import numpy as np
from tokenizers import Tokenizer as Backend

from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors

MAX_CACHED_CHARACTERS = 16_000_000  # total length of the words in a cache, which bounds its memory


class TextTokenizer:
    """Tokenizes texts without special tokens, truncated to `max_length` tokens.

    Tokenization takes most of the time of static embeddings. BERT's tokenizer treats the words between two spaces
    independently, so the tokens of each distinct word are cached: looking them up is about ten times as fast.
    """

    def __init__(self, backend: Backend, max_length: int | None) -> None:
        self._backend, self._caches = backend, max_length is None and has_independent_words(backend)
        if max_length is not None:
            backend.enable_truncation(max_length)
        self._known: dict[str, list[int]] = {}
        self._characters = 0

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all texts, (N,) int64, and the number of tokens of each, (S,) int64."""
        if not self._caches:
            ids = self._encode(texts)
            return _flat(ids), _lengths(ids)
        parts = [text.split(" ") for text in texts]
        words = list(chain.from_iterable(parts))
        ids = self._words(words)
        counts = _lengths(parts)
        return _flat(ids), np.add.reduceat(_lengths(ids), counts.cumsum() - counts)

    def _words(self, words: list[str]) -> list[list[int]]:
        found = list(map(self._known.get, words))
        if None in found:
            if self._characters > MAX_CACHED_CHARACTERS:
                self._known.clear()
                self._characters = 0
            new = list(dict.fromkeys(word for word in words if word not in self._known))
            self._known.update(zip(new, self._encode(new), strict=True))
            self._characters += sum(map(len, new))
        return [self._known[word] for word in words]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        with tokenizer_errors():
            return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def has_independent_words(backend: Backend) -> bool:
    """Returns whether the tokens of a text are those of its parts between spaces: whether it is BERT's tokenizer."""
    settings = json.loads(backend.to_str())
    types = {part: (settings.get(part) or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")}
    is_bert = types == {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer", "model": "WordPiece"}
    return is_bert and not any(" " in token["content"] for token in settings.get("added_tokens", ()))


def _flat(ids: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(ids), np.int64)


def _lengths(parts: Sequence[Sequence[object]]) -> np.ndarray:
    return np.fromiter(map(len, parts), np.int64, len(parts))

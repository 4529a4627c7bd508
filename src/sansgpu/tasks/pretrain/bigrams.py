"""Counts how often each token follows each other token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sansgpu.data.split import TokenRanges

COUNTED_TOKENS = 8 << 20  # enough for vocabularies of usual size; counting takes about a second
CHUNK = 1 << 22  # default tokens that are sorted at a time, to bound the memory

Bigrams = tuple[np.ndarray, np.ndarray, np.ndarray]  # (first token, second token, count), each (P,) int64


def count_bigrams(part: TokenRanges, vocabulary: int, limit: int = COUNTED_TOKENS, chunk: int = CHUNK) -> Bigrams:
    """Counts the pairs of adjacent tokens in documents that are evenly spread over `part`.

    Returns the distinct pairs sorted by first and second token. Counts all of the text if it has at most `limit`
    tokens. The last token of a document and the first one of the next are a pair, too, as in packed windows.
    """
    found = [
        np.unique(tokens[:-1] * vocabulary + tokens[1:], return_counts=True) for tokens in _chunks(part, limit, chunk)
    ]
    none = np.empty(0, np.int64)
    codes, index = np.unique(np.concatenate([none, *(pairs for pairs, _ in found)]), return_inverse=True)
    counts = np.zeros(len(codes), np.int64)
    np.add.at(counts, index, np.concatenate([none, *(numbers for _, numbers in found)]))
    return codes // vocabulary, codes % vocabulary, counts


def _chunks(part: TokenRanges, limit: int, chunk: int) -> Iterator[np.ndarray]:
    """Yields the tokens of every n-th document in pieces that overlap by one token, (at most `chunk`,) int64."""
    every = max(1, -(-part.token_count // limit))
    piece, left = np.empty(0, np.int64), limit
    for start, stop in zip(part.starts[::every].tolist(), part.stops[::every].tolist(), strict=True):
        stop = min(stop, start + left)
        left -= stop - start
        while start < stop:
            taken = part.tokens[start : min(stop, start + chunk - len(piece))]
            start += len(taken)
            piece = np.concatenate([piece, taken.astype(np.int64)])
            if len(piece) == chunk:
                yield piece
                piece = piece[-1:]
    if len(piece) > 1:
        yield piece

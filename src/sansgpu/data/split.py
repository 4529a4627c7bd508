"""Which documents are trained on and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sansgpu.data.shards import TokenSizes, TokenStore


@dataclass(frozen=True)
class TokenRanges:
    """A part of a store: documents, each tokens[start:stop]; all but a cut one begin with an end-of-text token."""

    tokens: np.ndarray
    starts: np.ndarray  # (D,) int64
    stops: np.ndarray  # (D,) int64
    sizes: TokenSizes | None = None

    @property
    def token_count(self) -> int:
        """Tokens in all."""
        return int((self.stops - self.starts).sum())

    def bytes_between(self, start: int, stop: int) -> int:
        """UTF-8 bytes of the text that tokens start..stop cover."""
        assert self.sizes is not None
        return self.sizes.between(start, stop)


def all_documents(store: TokenStore) -> TokenRanges:
    """The whole store."""
    stops = store.documents["end"].astype(np.int64)
    return TokenRanges(store.tokens, np.concatenate([[0], stops[:-1]]), stops, store.sizes)


def split_documents(store: TokenStore, share: float) -> tuple[TokenRanges, TokenRanges]:
    """Training and validation parts that share no document, not even an equal one.

    Documents are held out in the order of their content's hash until they hold `share` of the tokens, so the choice
    depends on no order of files, and equal documents fall on one side. The last one is held out only from the point
    on where the share is reached: of a single text its end.
    """
    whole = all_documents(store)
    lengths = whole.stops - whole.starts
    hashes = store.documents["content_hash"]
    order = np.argsort(hashes, kind="stable")
    goal = whole.token_count - int(whole.token_count * (1 - share))
    last = int(np.searchsorted(np.cumsum(lengths[order]), goal))
    held = hashes <= hashes[order[last]]
    train_stops, validation_starts = whole.stops.copy(), whole.starts.copy()
    twins = hashes == hashes[order[last]]
    if twins.sum() == 1:
        surplus = int(lengths[held].sum()) - goal
        cut = whole.starts[order[last]] + surplus
        train_stops[order[last]] = cut
        validation_starts[order[last]] = cut
    else:
        train_stops[twins] = whole.starts[twins]
    # A cut document has no end-of-text before it, so it stands first: behind another it would follow as its text.
    held_order = np.argsort(~twins[held], kind="stable")
    trained = ~held | (twins & (train_stops > whole.starts))
    return (
        TokenRanges(store.tokens, whole.starts[trained], train_stops[trained], store.sizes),
        TokenRanges(store.tokens, validation_starts[held][held_order], whole.stops[held][held_order], store.sizes),
    )


def split_examples(contents: Sequence[bytes], sizes: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the examples to train on and of those held out, which are equal to none of the others.

    Examples are held out in the order of their content's hash until they hold `share` of the sizes.
    """
    hashes = np.array([int.from_bytes(hashlib.blake2b(c, digest_size=8).digest(), "little") for c in contents], "<u8")
    order = np.argsort(hashes, kind="stable")
    last = int(np.searchsorted(np.cumsum(sizes[order]), share * sizes.sum()))
    held = hashes <= hashes[order[min(last, len(order) - 1)]]
    return np.flatnonzero(~held), np.flatnonzero(held)

"""Splits documents and examples into a training and a validation part."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sansgpu.config.wording import counted
from sansgpu.data.shards import TokenSizes, TokenStore

FEW_HELD_OUT = 30  # with fewer examples, the 95% confidence interval of an accuracy can be 1/3 wide or wider


def describe_split(train: int, held: int, what: str, share: float) -> str:
    """Returns a message about the split of data without a validation set; `what` is the unit, such as "example"."""
    clause = f"{counted(train, what)} for training, {held:,} held out for validation (data.validation_split {share:g})"
    if held >= FEW_HELD_OUT:
        return clause
    return (
        f"{clause}, too few for a precise evaluation: raise data.validation_split, or set data.validation_name to a "
        "validation dataset"
    )


def describe_leak(train: Iterable[Hashable], held: Sequence[Hashable], what: str) -> str | None:
    """Returns a message about validation examples that are also training examples, or None; `what` is the unit."""
    known = {*train}
    leaked = sum(one in known for one in held)
    return f"also in the training data: {leaked:,} of {counted(len(held), f'validation {what}')}" if leaked else None


@dataclass(frozen=True)
class TokenRanges:
    """A subset of a token store's documents. Document i is tokens[starts[i]:stops[i]].

    A document starts with an end-of-text token, unless `split_documents` has cut its beginning off.
    """

    tokens: np.ndarray
    starts: np.ndarray  # (D,) int64
    stops: np.ndarray  # (D,) int64
    sizes: TokenSizes | None = None

    @property
    def token_count(self) -> int:
        return int((self.stops - self.starts).sum())

    def token_sizes(self) -> np.ndarray:
        """Returns the UTF-8 bytes of text covered by each token of the documents, in order: (token_count,)."""
        assert self.sizes is not None
        pieces = [self.sizes.of_tokens(int(a), int(b)) for a, b in zip(self.starts, self.stops, strict=True)]
        return np.concatenate(pieces)

    def bytes_between(self, start: int, stop: int) -> int:
        """Returns the UTF-8 bytes of text covered by tokens [start, stop)."""
        assert self.sizes is not None
        return self.sizes.between(start, stop)


def all_documents(store: TokenStore) -> TokenRanges:
    """Returns all documents of a store."""
    stops = store.documents["end"].astype(np.int64)
    return TokenRanges(store.tokens, np.concatenate([[0], stops[:-1]]), stops, store.sizes)


def split_documents(store: TokenStore, share: float) -> tuple[TokenRanges, TokenRanges]:
    """Splits a store into training and validation documents. Documents with the same content are in the same split.

    Documents are held out in the order of their content hash until they have `share` of the tokens, so the split does
    not depend on the order of files. To hold out exactly that share, the last one is cut and only its end is held out,
    unless it has duplicates.
    """
    documents = all_documents(store)
    lengths = documents.stops - documents.starts
    hashes = store.documents["content_hash"]
    order = np.argsort(hashes, kind="stable")
    goal = documents.token_count - int(documents.token_count * (1 - share))
    last = int(np.searchsorted(np.cumsum(lengths[order]), goal))
    is_held_out = hashes <= hashes[order[last]]
    train_stops, validation_starts = documents.stops.copy(), documents.starts.copy()
    duplicates = hashes == hashes[order[last]]
    if duplicates.sum() == 1:
        surplus = int(lengths[is_held_out].sum()) - goal
        cut = documents.starts[order[last]] + surplus
        train_stops[order[last]] = cut
        validation_starts[order[last]] = cut
    else:
        train_stops[duplicates] = documents.starts[duplicates]
    # The cut document goes first: it has no end-of-text token at its start, so it would seem to continue another one.
    held_order = np.argsort(~duplicates[is_held_out], kind="stable")
    trained = ~is_held_out | (duplicates & (train_stops > documents.starts))
    return (
        TokenRanges(store.tokens, documents.starts[trained], train_stops[trained], store.sizes),
        TokenRanges(
            store.tokens,
            validation_starts[is_held_out][held_order],
            documents.stops[is_held_out][held_order],
            store.sizes,
        ),
    )


def split_examples(contents: Sequence[bytes], sizes: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of training and validation examples. Examples with the same content are in the same split.

    Examples are held out in the order of their content hash until they have `share` of the total size.
    """
    hashes = np.array([int.from_bytes(hashlib.blake2b(c, digest_size=8).digest(), "little") for c in contents], "<u8")
    order = np.argsort(hashes, kind="stable")
    last = int(np.searchsorted(np.cumsum(sizes[order]), share * sizes.sum()))
    is_held_out = hashes <= hashes[order[min(last, len(order) - 1)]]
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)

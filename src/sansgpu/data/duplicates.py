"""Finds documents that are equal, or near duplicates by MinHash with locality-sensitive hashing (LSH).

A document is the set of its sequences of SHINGLE_WORDS consecutive words (shingles). The smallest value that a hash
function has on the set is equal for two documents with a probability of their Jaccard similarity, the number of common
shingles over that of all (Broder 1997). HASHES such values are a document's signature. Documents are compared if they
agree on all values in one of the BANDS of their signatures. Of each value only the lowest byte is stored, as in b-bit
minwise hashing (arXiv 0910.3349), so a signature needs HASHES bytes.

D documents, T texts, W words, S shingles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sansgpu.data.files import Piece
from sansgpu.data.shards import piece_batches

# FineWeb (arXiv 2406.17557, section 3.4): 5-grams of words, 14 bands of 8 hashes, "at least 75% similar".
SHINGLE_WORDS = 5
BANDS, BAND_HASHES = 14, 8
HASHES = BANDS * BAND_HASHES
MIN_SIMILARITY = 0.75
BATCH_CHARS = 1 << 18  # characters per batch, whose arrays fit into the CPU's caches
COMPARED_PAIRS = 1 << 16  # pairs of signatures compared at a time, to bound the memory
NO_SHINGLE = np.uint32(0xFFFFFFFF)  # in place of the smallest hash of a text without words
FIRST_WIDE_BYTE = 0xE3  # first byte of UTF-8 characters from U+3000, where Chinese and Japanese have words of one


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns a pseudorandom number for each number, uint64: the finalizer of splitmix64 (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _constants(purpose: int, count: int) -> np.ndarray:
    """Returns `count` fixed pseudorandom odd numbers, uint64."""
    return _mixed(np.arange(1, count + 1, dtype=np.uint64) + np.uint64(purpose << 32)) | np.uint64(1)


_IS_WORD = np.array([byte >= 0x80 or chr(byte).isalnum() or byte == ord("_") for byte in range(256)])
_LETTERS = _constants(1, 256) * _IS_WORD  # by byte; 0 between words
_LETTERS[ord("A") : ord("Z") + 1] = _LETTERS[ord("a") : ord("z") + 1]
_BASE = _constants(2, 1)  # a word's hash is a polynomial in this number, with a coefficient per letter
_PLACES = _constants(3, SHINGLE_WORDS)  # factors of a shingle's words
_FUNCTIONS = _constants(4, HASHES).astype(np.uint32)  # factors that make HASHES functions of one hash


@dataclass(frozen=True)
class DocumentHashes:
    """Hashes of documents: of the whole text, and the MinHash signature if near duplicates are sought."""

    content: np.ndarray  # (D,) uint64
    signatures: np.ndarray | None  # (D, HASHES) uint8

    def __len__(self) -> int:
        return len(self.content)

    def followed_by(self, others: DocumentHashes) -> DocumentHashes:
        """Returns the hashes of these documents and then `others`."""
        content = np.concatenate([self.content, others.content])
        if self.signatures is None or others.signatures is None:
            return DocumentHashes(content, None)
        return DocumentHashes(content, np.concatenate([self.signatures, others.signatures]))

    def are_first(self) -> np.ndarray:
        """Returns which documents are not a duplicate of an earlier one, (D,) bool.

        If A is a near duplicate of B, and B of C, all three are one group, of which only the first is not a duplicate.
        """
        return np.asarray(self.first_of_group() == np.arange(len(self)))

    def first_of_group(self) -> np.ndarray:
        """Returns the number of the first document that each document repeats, or its own number, (D,) int64."""
        if self.signatures is not None:
            return _first_of_group(self.signatures)
        _, first, group = np.unique(self.content, return_index=True, return_inverse=True)
        return np.asarray(first[group], np.int64)


def hash_documents(stream: Iterable[Piece], near: bool) -> DocumentHashes:
    """Returns the hashes of the documents in a stream of pieces, with signatures if `near`."""
    contents, signatures = [np.empty(0, np.uint64)], [np.empty((0, HASHES), np.uint8)]
    digest, unfinished = _new_digest(), None
    for batch in piece_batches(stream, lambda: BATCH_CHARS):
        finished: list[int] = []
        for piece in batch:
            digest.update(piece.text.encode())
            if piece.ends_document:
                finished.append(int.from_bytes(digest.digest(), "little"))
                digest = _new_digest()
        contents.append(np.array(finished, np.uint64))
        if near:
            smallest, unfinished = _smallest_by_document(batch, unfinished)
            signatures.append(_signatures(smallest, contents[-1]))
    return DocumentHashes(np.concatenate(contents), np.concatenate(signatures) if near else None)


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


def _smallest_by_document(batch: list[Piece], unfinished: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the smallest hashes (D, HASHES) of the documents that end in a batch, and of the one that does not.

    `unfinished` is the latter of the batch before.
    """
    ends = np.flatnonzero([piece.ends_document for piece in batch]) + 1
    starts = [0, *ends[ends < len(batch)]]
    smallest = np.minimum.reduceat(smallest_hashes([piece.text for piece in batch]), starts)
    if unfinished is not None:
        smallest[0] = np.minimum(smallest[0], unfinished)
    return smallest[: len(ends)], None if batch[-1].ends_document else smallest[-1]


def _signatures(smallest: np.ndarray, content: np.ndarray) -> np.ndarray:
    """Returns the lowest byte of each smallest hash, (D, HASHES), or the content hash of documents without words."""
    signatures = smallest.astype(np.uint8)
    wordless = smallest[:, 0] == NO_SHINGLE
    signatures[wordless] = np.tile(content[wordless, None].view(np.uint8), BANDS)
    return signatures


def smallest_hashes(texts: Sequence[str]) -> np.ndarray:
    """Returns the smallest value of each hash function on the shingles of each text, (T, HASHES) uint32."""
    hashes, text_of = shingle_hashes(texts)
    smallest = np.full((len(texts), HASHES), NO_SHINGLE)
    if len(hashes):
        starts = np.flatnonzero(np.diff(text_of, prepend=-1))
        values = np.empty_like(hashes)
        for number, factor in enumerate(_FUNCTIONS):
            np.multiply(hashes, factor, out=values)
            smallest[text_of[starts], number] = np.minimum.reduceat(values, starts)
    return smallest


def shingle_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a hash of each shingle, (S,) uint32, and the number of its text, (S,) int64.

    A text with fewer than SHINGLE_WORDS words has a single shingle with all of them.
    """
    words, text_of = _word_hashes(texts)
    counts = np.bincount(text_of, minlength=len(texts))
    numbers = np.arange(len(words)) - (np.cumsum(counts) - counts)[text_of]  # words are numbered in each text
    spread = np.arange(len(words)) + (SHINGLE_WORDS - 1) * text_of
    padded = np.zeros(len(words) + (SHINGLE_WORDS - 1) * len(texts), np.uint64)  # zeros after each text
    padded[spread] = words
    starts = numbers <= np.maximum(counts - SHINGLE_WORDS, 0)[text_of]
    hashes = np.zeros(int(starts.sum()), np.uint64)
    for place, factor in enumerate(_PLACES):
        hashes += padded[spread[starts] + place] * factor
    return (_mixed(hashes) >> np.uint64(32)).astype(np.uint32), text_of[starts]


def _word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a hash of each word, (W,) uint64, and the number of its text, (W,) int64.

    A word is a run of letters and digits, compared without case (in ASCII); every character from U+3000 starts one.
    """
    encoded = [f"{text}\n".encode() for text in texts]
    raw = np.frombuffer(b"".join(encoded), np.uint8)
    inside = _IS_WORD[raw]
    begins = inside & ~np.concatenate([[False], inside[:-1]]) | (raw >= FIRST_WIDE_BYTE)
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    lengths = np.diff(starts, append=len(raw))  # with what separates the word from the next, whose letters count 0
    places = np.arange(starts[0], len(raw)) - np.repeat(starts, lengths)
    powers = np.cumprod(np.full(int(lengths.max()), _BASE))
    words = np.add.reduceat(_LETTERS[raw[starts[0] :]] * powers[places], starts - starts[0])
    ends = np.cumsum([len(text) for text in encoded])
    return _mixed(words), np.searchsorted(ends, starts, side="right")


def _first_of_group(signatures: np.ndarray) -> np.ndarray:
    """Returns the number of the first document in the group of near duplicates of each document, (D,) int64."""
    first = np.arange(len(signatures))
    for band in signatures.view(np.uint64).T:  # (BANDS, D)
        for ones, others in _candidates(band):
            apart = first[ones] != first[others]
            ones, others = _near(signatures, ones[apart], others[apart])
            first = _smallest_reachable(len(first), first[ones], first[others])[first]
    return first


def _candidates(band: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields pairs of documents that agree on a band: each with the one before, then each with the first of them."""
    order = np.argsort(band, kind="stable")
    agrees = band[order[1:]] == band[order[:-1]]  # with the document before
    firsts = np.maximum.accumulate(np.where(agrees, 0, np.arange(1, len(order))))
    before = np.flatnonzero(agrees)
    for others in (before, firsts[before]):
        yield order[others], order[before + 1]


def _near(signatures: np.ndarray, ones: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns those of the pairs (ones[i], others[i]) whose estimated similarity is at least MIN_SIMILARITY."""
    equal = np.empty(len(ones), np.int64)
    for start in range(0, len(ones), COMPARED_PAIRS):
        block = slice(start, start + COMPARED_PAIRS)
        equal[block] = (signatures[ones[block]] == signatures[others[block]]).sum(axis=1)
    near = equal >= MIN_SIMILARITY * HASHES
    return ones[near], others[near]


def _smallest_reachable(count: int, ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the smallest number that each of `count` numbers reaches over pairs, (count,)."""
    smallest = np.arange(count)
    while len(ones):
        before = smallest.copy()
        np.minimum.at(smallest, others, before[ones])
        np.minimum.at(smallest, ones, before[others])
        smallest = smallest[smallest]
        if np.array_equal(smallest, before):
            break
    return smallest

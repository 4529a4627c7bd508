"""Cuts documents into windows of T tokens. In an epoch every token except the very first is a target exactly once.

A document consists of an end-of-text token and its own tokens. The target after its last token is the end-of-text
token of the next document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.data.settings import WindowedTrainingConfig
from sansgpu.data.split import TokenRanges

SHORTEST_PIECE = 32


class Windows(Protocol):
    """Windows for language modeling, accessed by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns the windows with these indices, one per row."""

    def target_bytes(self, indices: np.ndarray) -> np.ndarray:
        """Returns the UTF-8 bytes of text covered by the targets of each of these windows, (B,) int64."""


def make_windows(part: TokenRanges, window: int, end_id: int, pack: bool) -> PackedWindows | PaddedWindows:
    """Builds packed windows if `pack`, else padded ones."""
    return PackedWindows(part, window, end_id) if pack else PaddedWindows(part, window, end_id)


def piece_length(training: WindowedTrainingConfig, window: int, step: int, total_steps: int) -> int:
    """Returns the attention length of a step for sequence length warm-up; after the warm-up it is `window`.

    Tokens attend only within pieces of this length, which doubles in stages of equal duration. arXiv 2108.06084 grows
    the window itself; here the shape stays constant, so that the compiled graph is reused.
    """
    stages = max(0, math.ceil(math.log2(window / SHORTEST_PIECE)))
    steps = training.window_warmup_ratio * total_steps
    return SHORTEST_PIECE << int(step / steps * stages) if step < steps and stages else window


class PackedWindows:
    """Concatenates the documents and cuts the stream every T tokens; only the last window has padding."""

    def __init__(self, part: TokenRanges, window: int, end_id: int) -> None:
        self._part, self._window, self._end_id = part, window, end_id
        self._offsets = np.concatenate([[0], np.cumsum(part.stops - part.starts)])  # document starts in the stream

    def __len__(self) -> int:
        return -(-int(self._offsets[-1]) // self._window)

    def recut(self, draws: np.random.Generator) -> PackedWindows:
        """Returns as many windows of the same documents, concatenated in a random order.

        The beginning of the first document, less than a window, moves to the end, so that windows also begin at other
        tokens if there is only one document.
        """
        order = draws.permutation(len(self._part.starts))
        starts, stops = self._part.starts[order], self._part.stops[order]
        moved = int(draws.integers(min(self._window, int(stops[0] - starts[0]))))
        if moved:
            cut = starts[0] + moved
            starts, stops = np.append(starts, starts[0]), np.append(stops, cut)
            starts[0] = cut
        return PackedWindows(replace(self._part, starts=starts, stops=stops), self._window, self._end_id)

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns windows of T tokens. Document ids count within a window, positions within a document's part of it."""
        shape = (len(indices), self._window)
        inputs, targets = np.full(shape, self._end_id, np.int64), np.full(shape, IGNORE, np.int64)
        documents = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            start = int(index) * self._window
            tokens = self._read(start, start + self._window + 1)
            filled = len(tokens) - 1
            inputs[row, :filled], targets[row, :filled] = tokens[:-1], tokens[1:]
            first, last = np.searchsorted(self._offsets, [start + 1, start + filled])
            begins = self._offsets[first:last] - start  # positions at which later documents of the window start
            documents[row, begins] = 1
            if filled < self._window:
                documents[row, filled] = 1  # padding has its own document id
        documents = documents.cumsum(axis=1)
        if len(self._offsets) == 2:
            return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
        return Batch(*map(torch.from_numpy, (inputs, targets, _positions(documents), documents)))

    def target_bytes(self, indices: np.ndarray) -> np.ndarray:
        starts = [int(index) * self._window + 1 for index in indices]
        ranges = [self._ranges(start, start + self._window) for start in starts]
        return np.array([sum(self._part.bytes_between(*r) for r in found) for found in ranges], np.int64)

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Reads tokens [start, stop) of the concatenated documents and a final end-of-text token."""
        pieces = [self._part.tokens[first:last].astype(np.int64) for first, last in self._ranges(start, stop)]
        if stop > self._offsets[-1]:
            pieces.append(np.array([self._end_id], np.int64))
        return np.concatenate(pieces)

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields where tokens [start, stop) of the stream are in the store: one range per document."""
        document = int(np.searchsorted(self._offsets, start, side="right")) - 1
        while start < stop and document < len(self._part.starts):
            first = int(self._part.starts[document]) + start - int(self._offsets[document])
            last = min(first + stop - start, int(self._part.stops[document]))
            yield first, last
            start += last - first
            document += 1


class PaddedWindows:
    """Cuts each document separately. The last window of a document is right-padded, which causal attention ignores."""

    def __init__(self, part: TokenRanges, window: int, end_id: int) -> None:
        self._part, self._window, self._end_id = part, window, end_id
        counts = -(-(part.stops - part.starts) // window)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])  # index of each document's first window

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def batch(self, indices: np.ndarray) -> Batch:
        shape = (len(indices), self._window)
        inputs, targets = np.full(shape, self._end_id, np.int64), np.full(shape, IGNORE, np.int64)
        for row, index in enumerate(indices):
            start, stop, ends = self._range(int(index))
            tokens = self._part.tokens[start : stop + (not ends)].astype(np.int64)
            if ends:
                tokens = np.append(tokens, self._end_id)
            inputs[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))

    def target_bytes(self, indices: np.ndarray) -> np.ndarray:
        ranges = [self._range(int(index)) for index in indices]
        return np.array([self._part.bytes_between(a + 1, b + (not ends)) for a, b, ends in ranges], np.int64)

    def _range(self, index: int) -> tuple[int, int, bool]:
        """Returns start and end of a window's inputs in the store, and whether it is the last of its document."""
        document = int(np.searchsorted(self._offsets, index, side="right")) - 1
        start = int(self._part.starts[document]) + (index - int(self._offsets[document])) * self._window
        stop = min(start + self._window, int(self._part.stops[document]))
        return start, stop, stop == int(self._part.stops[document])


class TextWindows:
    """Documents tokenized as transformers' `tokenizer(text)` does, one per row.

    The last token of a document is only a target, not an input. Longer documents are cut into rows of T tokens. Each
    row starts with the first `before` tokens of its document, because some models need a BOS token; then come the
    tokens from the last target of the previous row on. Rows are sorted by length to reduce padding.
    """

    def __init__(self, part: TokenRanges, window: int, before: int, end_id: int) -> None:
        if before >= window:
            raise ConfigError(
                f"the context of {counted(window, 'token')} is filled by the {counted(before, 'special token')} at "
                "its start; raise --window."
            )
        self._part, self._before, self._end_id = part, before, end_id
        rows: list[tuple[int, int, int, int]] = []  # document start, prefix length, start and end of the inputs
        for start, stop in zip(part.starts.tolist(), part.stops.tolist(), strict=True):
            head, first = 0, start
            while first + 1 < stop:
                last = min(first + window - head, stop - 1)
                rows.append((start, head, first, last))
                head, first = before, last
        lengths = np.array([head + last - first for _, head, first, last in rows], np.int64)
        self._rows = [rows[index] for index in np.argsort(-lengths, kind="stable")]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns the rows with these indices, padded to the longest."""
        rows = [self._rows[index] for index in indices]
        shape = (len(rows), max(head + last - first for _, head, first, last in rows))
        inputs, targets = np.full(shape, self._end_id, np.int64), np.full(shape, IGNORE, np.int64)
        for row, (start, head, first, last) in enumerate(rows):
            stop = head + last - first
            inputs[row, :head] = self._part.tokens[start : start + head]
            inputs[row, head:stop] = self._part.tokens[first:last]
            targets[row, head:stop] = self._part.tokens[first + 1 : last + 1]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))

    def target_bytes(self, indices: np.ndarray) -> np.ndarray:
        rows = [self._rows[index] for index in indices]
        return np.array([self._part.bytes_between(first + 1, last + 1) for _, _, first, last in rows], np.int64)


def _positions(documents: np.ndarray) -> np.ndarray:
    """Converts document ids (B, T) to position ids (B, T), which restart at 0 with each document in a row."""
    places = np.arange(documents.shape[1])
    begins = np.diff(documents, axis=1, prepend=-1) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)

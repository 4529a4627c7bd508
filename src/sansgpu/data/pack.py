"""Documents -> windows of T tokens. Every token is predicted exactly once an epoch, but for a text's very first.

Each document is [end-of-text, its tokens]; the next end-of-text is what its last token predicts.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from sansgpu.config import TrainingConfig
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.data.split import TokenRanges

SHORTEST_PIECE = 32


class Windows(Protocol):
    """Numbered examples of one length."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch:
        """The examples of these numbers, one a row."""


def make_windows(part: TokenRanges, window: int, end_id: int, pack: bool) -> PackedWindows | PaddedWindows:
    """Windows as `data.pack_sequences` asks."""
    return PackedWindows(part, window, end_id) if pack else PaddedWindows(part, window, end_id)


def piece_length(training: TrainingConfig, window: int, step: int, total_steps: int) -> int:
    """Tokens of the pieces that windows are cut into at step 0 .. total_steps - 1; the window's own when it is whole.

    Stages of equally many steps, each with pieces twice as long as the one before. arXiv 2108.06084 grows the window
    itself; here its shape stays, and with it the compiled graph.
    """
    stages = max(0, math.ceil(math.log2(window / SHORTEST_PIECE)))
    steps = training.window_warmup_ratio * total_steps
    return SHORTEST_PIECE << int(step / steps * stages) if step < steps and stages else window


class PackedWindows:
    """The documents in one stream, cut every T tokens; only the last window has padding."""

    def __init__(self, part: TokenRanges, window: int, end_id: int) -> None:
        self._part, self._window, self._end_id = part, window, end_id
        self._offsets = np.concatenate([[0], np.cumsum(part.stops - part.starts)])  # of documents in the stream

    def __len__(self) -> int:
        return -(-int(self._offsets[-1]) // self._window)

    def batch(self, indices: np.ndarray) -> Batch:
        """Windows of T tokens with positions and document ids counted within the window."""
        shape = (len(indices), self._window)
        inputs, targets = np.full(shape, self._end_id, np.int64), np.full(shape, IGNORE, np.int64)
        documents = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            start = int(index) * self._window
            tokens = self._read(start, start + self._window + 1)
            filled = len(tokens) - 1
            inputs[row, :filled], targets[row, :filled] = tokens[:-1], tokens[1:]
            first, last = np.searchsorted(self._offsets, [start + 1, start + filled])
            begins = self._offsets[first:last] - start  # documents that begin inside, behind the window's first token
            documents[row, begins] = 1
            if filled < self._window:
                documents[row, filled] = 1  # padding is a document of its own
        documents = documents.cumsum(axis=1)
        if len(self._offsets) == 2:
            return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
        return Batch(*map(torch.from_numpy, (inputs, targets, _positions(documents), documents)))

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of the stream, which ends with an end-of-text token."""
        pieces = []
        document = int(np.searchsorted(self._offsets, start, side="right")) - 1
        while start < stop and document < len(self._part.starts):
            place = int(self._part.starts[document]) + start - int(self._offsets[document])
            piece = self._part.tokens[place : min(place + stop - start, int(self._part.stops[document]))]
            pieces.append(piece.astype(np.int64))
            start += len(piece)
            document += 1
        if start < stop:
            pieces.append(np.array([self._end_id], np.int64))
        return np.concatenate(pieces)


class PaddedWindows:
    """Every document in windows of its own, the last one padded at its end, where causal attention never looks."""

    def __init__(self, part: TokenRanges, window: int, end_id: int) -> None:
        self._part, self._window, self._end_id = part, window, end_id
        counts = -(-(part.stops - part.starts) // window)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])  # windows before each document

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def batch(self, indices: np.ndarray) -> Batch:
        """Windows of T tokens, each of one document."""
        shape = (len(indices), self._window)
        inputs, targets = np.full(shape, self._end_id, np.int64), np.full(shape, IGNORE, np.int64)
        for row, index in enumerate(indices):
            document = int(np.searchsorted(self._offsets, index, side="right")) - 1
            start = int(self._part.starts[document]) + (int(index) - int(self._offsets[document])) * self._window
            stop = int(self._part.stops[document])
            tokens = self._part.tokens[start : min(start + self._window + 1, stop)].astype(np.int64)
            if start + self._window >= stop:
                tokens = np.append(tokens, self._end_id)
            inputs[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def _positions(documents: np.ndarray) -> np.ndarray:
    """Distance to the first token of the same document in the row. (B, T) -> (B, T)."""
    places = np.arange(documents.shape[1])
    begins = np.diff(documents, axis=1, prepend=-1) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)

"""Batches of sequences of different lengths, concatenated without padding. B examples, N tokens in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.data.batch import IGNORE, ExampleBatch, concatenated


@dataclass(frozen=True)
class PackedSequences(ExampleBatch):
    """B concatenated examples with one target per token, (N,), or K targets per example, (B, K).

    The loss skips int64 targets equal to IGNORE and float32 targets that are NaN.
    """

    tokens: torch.Tensor  # (N,) int64
    lengths: torch.Tensor  # (B,) int64
    targets: torch.Tensor  # (N,) or (B, K) int64, or (B, K) float32
    types: torch.Tensor | None = None  # (N,) int64: token type ids, if the model uses them
    numbers: torch.Tensor | None = None  # (B,) int64: indices of the examples in the dataset
    teacher_ids: torch.Tensor | None = None  # (N, K) int32: a teacher's most likely tokens
    teacher_log_probabilities: torch.Tensor | None = None  # (N, K + 1) fp16; last: sum over all other tokens
    teacher_target_log_probabilities: torch.Tensor | None = None  # (N,) fp16: a teacher's, of the targets

    @classmethod
    def of(
        cls,
        tokens: Sequence[np.ndarray],
        targets: Sequence[np.ndarray] | np.ndarray,
        types: Sequence[np.ndarray] | None = None,
        numbers: np.ndarray | None = None,
    ) -> PackedSequences:
        """Concatenates one array of token ids per example; `targets` are arrays of the same lengths, or one (B, K).

        float32 targets are values for regression; other dtypes are class ids and become int64.
        """
        return cls(
            concatenated(tokens),
            torch.tensor([len(part) for part in tokens], dtype=torch.int64),
            _target_tensor(targets) if isinstance(targets, np.ndarray) else concatenated(targets),
            None if types is None else concatenated(types),
            None if numbers is None else torch.from_numpy(numbers.astype(np.int64)),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def has_target(self) -> torch.Tensor:
        """Returns which tokens (N,), or examples (B,), have a target that is not ignored, as bool."""
        targets = self.targets.reshape(len(self.targets), -1)
        return (~targets.isnan() if targets.is_floating_point() else targets != IGNORE).any(dim=1)

    def target_count(self) -> int:
        """Returns the number of tokens, or examples, that have a target."""
        return int(self.has_target().sum())

    def token_count(self) -> int:
        return len(self.tokens)

    def rows(self, start: int, stop: int) -> PackedSequences:
        first, last = (int(self.lengths[:end].sum()) for end in (start, stop))
        by_token = self.targets.ndim == 1

        def of_tokens(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[first:last]

        return PackedSequences(
            self.tokens[first:last],
            self.lengths[start:stop],
            self.targets[first:last] if by_token else self.targets[start:stop],
            of_tokens(self.types),
            None if self.numbers is None else self.numbers[start:stop],
            of_tokens(self.teacher_ids),
            of_tokens(self.teacher_log_probabilities),
            of_tokens(self.teacher_target_log_probabilities),
        )

    def with_shared_beginning(self, count: int) -> Self:
        return replace(self, tokens=shared_beginning(self.tokens, self.lengths, count))

    def without_targets(self, size: int) -> PackedSequences:
        first = self.rows(0, 1)
        unknown = torch.nan if first.targets.is_floating_point() else IGNORE
        return replace(first, targets=torch.full_like(first.targets, unknown))


def shared_beginning(tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """Replaces the first `count` tokens of each example by those of the first one; `tokens` (N,), `lengths` (B,)."""
    found, stops = tokens.clone(), lengths.cumsum(0)
    for start, stop in zip((stops - lengths).tolist(), stops.tolist(), strict=True):
        found[start : min(start + count, stop)] = tokens[: min(count, stop - start)]
    return found


def _target_tensor(targets: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(targets if targets.dtype == np.float32 else targets.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Window:
    """A window of T tokens of a longer text, which may follow or precede another text, such as a question."""

    text: int  # index of the text
    ids: np.ndarray  # (T,) int32
    type_ids: np.ndarray | None  # (T,) int8, if the tokenizer returns them


class EncodedWindow(NamedTuple):
    """A window as the tokenizer returns it."""

    window: Window
    offsets: np.ndarray  # (T, 2) int32: start and end character of each token in its text
    sides: np.ndarray  # (T,): 0 for tokens of the first text, 1 for tokens of the second, -1 for special tokens


def encoded_windows(
    texts: Sequence[Sequence[str]], tokenizer: Any, split: int, first: int, max_length: int, overlap: int
) -> Iterator[EncodedWindow]:
    """Tokenizes examples of one or two texts into windows of at most `max_length` tokens.

    `texts` has a list for each text of an example. The one with index `split` is split into windows, which overlap by
    `overlap` tokens. `first` is the index of the first example.
    """
    encoded = tokenizer(
        *texts,
        truncation=("only_first", "only_second")[split],
        max_length=max_length,
        stride=overlap,
        padding=False,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    for number, owner in enumerate(encoded["overflow_to_sample_mapping"]):
        types = encoded["token_type_ids"][number] if "token_type_ids" in encoded else None
        ids = np.array(encoded["input_ids"][number], np.int32)
        yield EncodedWindow(
            Window(first + int(owner), ids, None if types is None else np.array(types, np.int8)),
            np.array(encoded["offset_mapping"][number], np.int32).reshape(-1, 2),
            np.array([-1 if side is None else side for side in encoded.sequence_ids(number)], np.int64),
        )


class WindowedTexts:
    """Base of datasets whose texts are tokenized into windows."""

    windows: Sequence[Window]

    def __len__(self) -> int:
        return len(self.windows)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each window."""
        return np.array([len(window.ids) for window in self.windows], np.int64)

    def sequence(self, index: int) -> np.ndarray:
        return self.windows[index].ids

    def by_text(self) -> list[list[int]]:
        """Returns the indices of the windows of each text, without texts that have none."""
        groups: dict[int, list[int]] = {}
        for number, window in enumerate(self.windows):
            groups.setdefault(window.text, []).append(number)
        return list(groups.values())

    def packed(self, numbers: np.ndarray, targets: Sequence[np.ndarray] | np.ndarray) -> PackedSequences:
        """Returns a batch of the windows with the indices `numbers`."""
        windows = [self.windows[number] for number in numbers]
        types = [window.type_ids for window in windows if window.type_ids is not None]
        return PackedSequences.of([window.ids for window in windows], targets, types or None, numbers)


@dataclass(frozen=True)
class LabeledSequences:
    """Examples of different lengths with targets (B, K). `rows` are those that they were made of, if they are kept."""

    tokens: Sequence[np.ndarray]
    targets: np.ndarray
    types: Sequence[np.ndarray] | None = None
    rows: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.tokens], np.int64)

    def sequence(self, index: int) -> np.ndarray:
        return self.tokens[index]

    def batch(self, numbers: np.ndarray) -> PackedSequences:
        """Returns a batch of the examples with the indices `numbers`."""
        types = None if self.types is None else [self.types[number] for number in numbers]
        return PackedSequences.of([self.tokens[number] for number in numbers], self.targets[numbers], types, numbers)


def require_overlap_fits(tokenizer: Any, max_length: int, doc_stride: int, pair: bool) -> int:
    """Returns how many tokens a window holds besides special tokens. Raises ConfigError if the overlap fills it."""
    room = max_length - int(tokenizer.num_special_tokens_to_add(pair=pair))
    if doc_stride >= room:
        raise ConfigError(
            f"data.doc_stride {doc_stride} leaves no room for new tokens in a window of data.max_length {max_length}; "
            "lower data.doc_stride or raise data.max_length."
        )
    return room

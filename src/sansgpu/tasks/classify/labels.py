"""Finds the labels of a dataset, converts them to targets, and tokenizes labeled texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted, truncate
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.row_report import RowReport
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors

LabelKind = Literal["single", "multiple", "regression"]

MAX_NUMBER_CLASSES = 30  # if there are more distinct integers, they are scores, unless data.label_kind is set
BATCH = 1000  # texts per call of the tokenizer, which runs in parallel


@dataclass(frozen=True)
class Labels:
    """The kind of a dataset's labels, and their names in the order of the logits; no names for regression."""

    kind: LabelKind
    names: tuple[str, ...]
    note: str | None = None  # message on why this kind was chosen

    @property
    def shown(self) -> str:
        return "a number to predict" if self.kind == "regression" else counted(len(self.names), "label")


def _number(value: Any) -> float | None:
    """Converts a label that is a number, or a string with one, to float; None if it is not a finite number."""
    if isinstance(value, (bool, list)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def find_labels(
    texts: Sequence[LabeledText], configured: Literal["auto"] | LabelKind, names: Sequence[str] | None, source: str
) -> Labels:
    """Determines the kind and the names of the labels of dataset `source`. Raises ConfigError if all are equal."""
    kind: LabelKind
    note = None
    if configured == "auto":
        kind, why = _kind([text.label for text in texts])
        note = f"{source}: {why}; if that is wrong, set data.label_kind." if why else None
    else:
        kind = configured
    found = dict.fromkeys(label for text in texts for label in text.labels)
    if (len(found) == 1 and kind != "multiple") or not found:
        shown = f"only one label, {truncate(next(iter(found)))!r}" if found else "no label"
        raise ConfigError(f"{source} has {shown}, so there is nothing to learn; add rows with different labels.")
    if kind == "regression":
        return Labels(kind, (), note)
    names = names if names is not None else _ordered(list(found))
    return Labels(kind, tuple(names), note)


def _kind(labels: Sequence[Any]) -> tuple[LabelKind, str]:
    """Returns the kind of labels, and a message with the reason, which is empty in the usual case."""
    if any(isinstance(label, list) for label in labels):
        return "multiple", "labels are lists, so each row may have several labels"
    numbers = {_number(label) for label in labels}
    values = [value for value in numbers if value is not None]
    if len(values) < len(numbers):
        return "single", ""
    if any(not value.is_integer() for value in values):
        return "regression", "labels are numbers with fractions, so the model predicts a number (regression)"
    if len(values) > MAX_NUMBER_CLASSES:
        reason = f"labels are {len(values)} distinct numbers, so the model predicts a number (regression)"
        return "regression", reason
    return "single", ""


def _ordered(names: list[str]) -> list[str]:
    """Sorts labels: by value if they are numbers, otherwise alphabetically."""
    numbers = {name: _number(name) for name in names}
    if all(number is not None for number in numbers.values()):
        return sorted(names, key=lambda name: (numbers[name], name))
    return sorted(names)


def with_targets(
    texts: Sequence[LabeledText], labels: Labels, bad_rows: RowReport
) -> tuple[list[LabeledText], np.ndarray]:
    """Returns the texts whose labels are all in `labels`, and their targets.

    Targets are (R, 1) int64 label ids, (R, L) int64 zeros and ones for multi-label classification, or (R, 1) float32
    scores.
    """
    index = {name: number for number, name in enumerate(labels.names)}

    def target(text: LabeledText) -> tuple[LabeledText, list[float]]:
        if labels.kind == "regression":
            number = _number(text.label)
            if number is None:
                raise text.error(f"its label is {text.label!r}, not a number")
            return text, [number]
        if labels.kind == "single" and isinstance(text.label, list):
            raise text.error("its label is a list, but data.label_kind is single")
        if unknown := next((name for name in text.labels if name not in index), None):
            raise text.error(f"its label {unknown!r} is not one of the {len(index)} labels of the training data")
        chosen = [index[name] for name in text.labels]
        if labels.kind == "single":
            return text, [chosen[0]]
        return text, [float(number in chosen) for number in range(len(index))]

    kept = list(bad_rows.parsed(texts, target))
    width = len(index) if labels.kind == "multiple" else 1
    dtype = np.float32 if labels.kind == "regression" else np.int64
    return [text for text, _ in kept], np.array([row for _, row in kept], dtype).reshape(-1, width)


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids of texts and, if the tokenizer returns them, token type ids; `truncated` counts truncated texts."""

    ids: list[np.ndarray]
    types: list[np.ndarray] | None
    truncated: int


@tokenizer_errors()
def tokenize_texts(texts: Sequence[LabeledText], tokenizer: Any, max_length: int) -> EncodedTexts:
    """Tokenizes texts and pairs with special tokens, truncated to `max_length` (of a pair, the longer text first)."""
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    truncated = 0
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        pairs = [(text.text,) if text.pair is None else (text.text, text.pair) for text in batch]
        given = [pair if len(pair) == 2 else pair[0] for pair in pairs]
        encoded = tokenizer(given, truncation=True, max_length=max_length, padding=False, verbose=False)
        truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
        ids += [np.array(row, np.int32) for row in encoded["input_ids"]]
        types += [np.array(row, np.int8) for row in encoded.get("token_type_ids", ())]
    return EncodedTexts(ids, types or None, truncated)

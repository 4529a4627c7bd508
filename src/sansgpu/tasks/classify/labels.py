"""Finds the labels of a dataset, converts them to targets, and tokenizes labeled texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted, truncate
from sansgpu.data.forms.labels import LabeledText, label_name
from sansgpu.data.row_report import RowReport
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.tasks.classify.label_values import (
    LEADING_ZERO,
    SEPARATORS,
    LabelCells,
    bit,
    is_broken_list,
    number_of,
    numbers_kind,
    recognize_cells,
    unusual_number,
)
from sansgpu.tasks.classify.settings import WeightedDataConfig

LabelKind = Literal["single", "multiple", "regression"]

BATCH = 1000  # texts per call of the tokenizer, which runs in parallel
NO_LABEL = "-1"  # stands for a missing label next to the ids 0, 1, 2, as in datasets of the Hugging Face Hub


@dataclass(frozen=True)
class Labels:
    """The kind of a dataset's labels, and their names in the order of the logits; no names for regression."""

    kind: LabelKind
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # messages on why this kind and these names were chosen
    cells: LabelCells | None = None  # how the rows write them; None: recognized in each dataset

    @property
    def shown(self) -> str:
        return "a number to predict" if self.kind == "regression" else counted(len(self.names), "label")

    def names_in(self, text: LabeledText, cells: LabelCells) -> list[str]:
        """Returns the names of a row's labels. Raises BadRowError if they are none of those that are known."""
        if isinstance(text.label, str) and (name := self._name_of(text.label)) in self.names:
            return [name]
        found = cells.labels_of(text.label)
        if cells.kind == "vector":
            return self._names_of_vector(text, found, cells.width)
        has_several = cells.kind == "list" or isinstance(text.label, list)
        fraction = next((v for v in found if has_several and isinstance(v, float) and not v.is_integer()), None)
        if fraction is not None:
            raise text.error(f"its label lists the number {fraction:g}, but probabilities of labels cannot be learned")
        if cells.kind == "list" and is_broken_list(text.label):
            raise text.error(f"its label is {text.label!r}, which begins like a list, but is none")
        names = list(dict.fromkeys(map(self._name_of, found)))
        if (unknown := next((name for name in names if name not in self.names), None)) is not None:
            raise text.error(
                f"its label {unknown!r} is not one of the {len(self.names)} labels of the training data"
                if unknown != NO_LABEL or "2" not in self.names
                else "its label is -1, which usually means that a row has no label (to learn it, add it to data.labels)"
            )
        return names

    def _name_of(self, value: Any) -> str:
        exact = str(value).strip()  # data.labels may have a name such as 1.0
        return exact if exact in self.names else label_name(value)

    def _names_of_vector(self, text: LabeledText, values: list[Any], width: int) -> list[str]:
        bits = [bit(value) for value in values]
        if len(bits) != width or None in bits:
            length = "" if len(bits) == width else f" with {counted(len(bits), 'value')}"
            raise text.error(f"its label is {text.label!r}{length}, but others are vectors of {width} zeros and ones")
        return [name for name, chosen in zip(self.names, bits, strict=True) if chosen]


def find_labels(texts: Sequence[LabeledText], data: WeightedDataConfig, source: str, columns: Sequence[str]) -> Labels:
    """Determines the kind and the names of the labels of dataset `source`. Raises ConfigError if all are equal.

    `columns` are the columns of zeros and ones that the labels come from, if any.
    """
    values, configured = [text.label for text in texts], data.label_kind
    names: Sequence[str] | None = data.labels
    split = None if configured == "auto" else configured == "multiple"
    cells = LabelCells() if columns else recognize_cells(values, split, data.label_separator)
    kind, why = _kind(values, cells, configured, names)
    if columns:
        names, why = columns if names is None else names, ""
    found = _names_of(texts, cells)
    if (len(found) == 1 and kind != "multiple") or not (found or names):
        shown = f"only one label, {truncate(next(iter(found)))!r}" if found else "no label"
        raise ConfigError(f"{source} has {shown}, so there is nothing to learn; add rows with different labels.")
    notes = [f"{source}: {why}."] if why else []
    if kind == "regression":
        return Labels(kind, (), tuple(notes), cells)
    if names is None:
        names = _ordered(found)
    elif cells.kind == "vector" and len(names) != cells.width:
        raise ConfigError(
            f"{source}: labels are vectors of {cells.width} zeros and ones, but data.labels has {len(names)} names; "
            f"set it to {cells.width} names."
        )
    return Labels(kind, tuple(names), tuple(notes), cells)


def _names_of(texts: Sequence[LabeledText], cells: LabelCells) -> list[str]:
    if cells.kind == "vector":
        return [str(number) for number in range(cells.width)]
    whole = [text.label for text in texts if not (cells.kind == "list" and is_broken_list(text.label))]
    found = dict.fromkeys(label_name(label) for value in whole for label in cells.labels_of(value))
    if {NO_LABEL, "0", "1", "2"} <= {*found}:
        del found[NO_LABEL]
    return [*found]


def _kind(
    values: Sequence[Any], cells: LabelCells, configured: Literal["auto"] | LabelKind, names: Sequence[str] | None
) -> tuple[LabelKind, str]:
    """Returns the kind of labels, and a message with the reason, which is empty in the usual case."""
    if configured != "auto":
        return configured, ""
    if cells.kind != "one" or any(isinstance(value, list) for value in values):
        named = "; data.labels names them" if cells.kind == "vector" and not names else ""
        return "multiple", f"{cells.why}, so each row may have several labels (data.label_kind multiple){named}"
    if cells.why:
        return "single", f"{cells.why} (data.label_kind single); if they are several, set data.label_separator"
    kind = None if names else numbers_kind(values)
    if kind is None:
        odd = None if names else unusual_number(values)
        return "single", "" if odd is None else (
            f"labels such as {truncate(odd)!r} are no plain numbers, so each label is a class; to predict a number, "
            "write all labels like 1200.5, or remove the rows without one"
        )
    other = "regression" if kind[0] == "single" else "single"
    return kind[0], f"{kind[1]}; if that is wrong, set data.label_kind to {other}"


def _ordered(names: list[str]) -> list[str]:
    """Sorts labels: by value if they are numbers, otherwise, and if they are codes such as 007, alphabetically."""
    numbers = {name: number_of(name) for name in names}
    if all(number is not None for number in numbers.values()) and not any(map(LEADING_ZERO.fullmatch, names)):
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
    cells = labels.cells or cells_with_names(texts, labels)

    def target(text: LabeledText) -> tuple[LabeledText, list[float]]:
        if labels.kind == "regression":
            number = number_of(text.label)
            if number is None:
                raise text.error(f"its label is {text.label!r}, not a number")
            return text, [number]
        chosen = [index[name] for name in labels.names_in(text, cells)]
        if labels.kind == "multiple":
            return text, [float(number in chosen) for number in range(len(index))]
        if isinstance(text.label, list) and len(chosen) != 1:
            raise text.error("its label is a list, but data.label_kind is single")
        return text, [chosen[0]]

    kept = list(bad_rows.parsed(texts, target))
    width = len(index) if labels.kind == "multiple" else 1
    dtype = np.float32 if labels.kind == "regression" else np.int64
    return [text for text, _ in kept], np.array([row for _, row in kept], dtype).reshape(-1, width)


def cells_with_names(texts: Sequence[LabeledText], labels: Labels) -> LabelCells:
    """Returns how the rows of a dataset to evaluate on write labels whose names are known."""
    if labels.kind != "multiple":
        return LabelCells()
    values = [text.label for text in texts]
    cells = recognize_cells(values, None, None)
    if cells.kind == "vector" and cells.width == len(labels.names):
        return cells
    unknown = [label_name(v) for v in values if isinstance(v, str) and label_name(v) not in labels.names]
    separators = (s for s in SEPARATORS if any({*map(str.strip, v.split(s))} <= {*labels.names} for v in unknown))
    return LabelCells("list", next(separators, None))


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

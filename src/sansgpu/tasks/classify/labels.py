"""Parses labeled texts: a text or a pair of texts, with one label, several labels or a score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from sansgpu.config import ConfigError, DataConfig
from sansgpu.config.wording import counted, truncate
from sansgpu.data.files import file_form
from sansgpu.data.headers import TABLES, FirstLine, require_no_header
from sansgpu.data.rows import (
    LABEL_COLUMNS,
    ROW_REMEDY,
    TEXT_NAMES,
    BadRowError,
    BadRows,
    SourceRow,
    column_key,
    column_names,
    row_text,
    shorten,
)
from sansgpu.data.sources import local_files
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors

Data = TypeVar("Data", bound=DataConfig)
LabelKind = Literal["single", "multiple", "regression"]

PAIR_COLUMN = "text_pair"
MAX_NUMBER_CLASSES = 30  # if there are more distinct integers, they are scores, unless data.label_kind is set
BATCH = 1000  # texts per call of the tokenizer, which runs in parallel


@dataclass(frozen=True)
class LabeledText:
    """A text or a pair of texts. The label is a string, number or boolean, or a list of them; None means unknown."""

    where: str
    text: str
    pair: str | None
    label: Any

    @property
    def labels(self) -> list[str]:
        """The names of the row's labels."""
        return [label_name(value) for value in (self.label if isinstance(self.label, list) else [self.label])]

    def error(self, problem: str) -> BadRowError:
        return BadRowError(f"{self.where}: {shorten(problem)}{ROW_REMEDY}")


@dataclass(frozen=True)
class Labels:
    """The kind of a dataset's labels, and their names in the order of the logits; no names for regression."""

    kind: LabelKind
    names: tuple[str, ...]
    note: str | None = None  # message on why this kind was chosen

    @property
    def shown(self) -> str:
        return "a number to predict" if self.kind == "regression" else counted(len(self.names), "label")


def read_texts(rows: Iterable[SourceRow], data: DataConfig, bad_rows: BadRows) -> list[LabeledText]:
    """Reads labeled texts in order."""
    return list(bad_rows.parsed(rows, lambda row: _labeled(row, data)))


def unlabeled_text(row: SourceRow, data: DataConfig) -> LabeledText:
    """Parses a row for prediction, ignoring its label, if any. Raises BadRowError if it is invalid."""
    given = _columns(row)
    column = _column(given, data.text_column, ())
    pair = _column(given, data.text_pair_column, (PAIR_COLUMN,))
    if data.text_pair_column is not None and pair is None:
        raise row.error(f"it has no column {data.text_pair_column}, only {column_names(given)}")
    label = _column(given, data.label_column, LABEL_COLUMNS)
    others = {key: value for key, value in given.items() if key != label}
    try:
        return _text(row, others, column, pair)
    except BadRowError:
        if column is None and sum(isinstance(value, str) for value in others.values()) > 1 and "text" not in others:
            wanted = data.text_column or "text"
            raise row.error(f"it has no column {wanted}, only {column_names(given)}") from None
        raise


def _labeled(row: SourceRow, data: DataConfig) -> LabeledText:
    given = _columns(row)
    label = _column(given, data.label_column, LABEL_COLUMNS)
    if label is None:
        wanted = data.label_column if data.label_column is not None else " or ".join(LABEL_COLUMNS)
        raise BadRowError(f"{row.where} has no column {wanted}, only {column_names(given)}; set data.label_column.")
    pair = _column(given, data.text_pair_column, (PAIR_COLUMN,))
    if data.text_pair_column is not None and pair is None:
        raise BadRowError(
            f"{row.where} has no column {data.text_pair_column}, only {column_names(given)}; set data.text_pair_column."
        )
    value = given[label]
    for one in value if isinstance(value, list) else [value]:
        _require_label(row, one)
    column = None if data.text_column is None else column_key(given, data.text_column)
    parsed = _text(row, {key: inner for key, inner in given.items() if key != label}, column, pair)
    return LabeledText(parsed.where, parsed.text, parsed.pair, value)


def _columns(row: SourceRow) -> dict[Any, Any]:
    if not isinstance(row.readable_value(), dict):
        raise row.error(f"it is of type {type(row.value).__name__} instead of an object with a text and a label")
    given: dict[Any, Any] = row.value
    return given


def _column(given: dict[Any, Any], chosen: str | int | None, usual: tuple[str, ...]) -> Any:
    """Returns the key of the `chosen` column or, if that is None, of the first `usual` column that exists, or None."""
    keys = usual if chosen is None else (column_key(given, chosen), str(chosen))
    return next((key for key in keys if key in given), None)


def _text(row: SourceRow, given: dict[Any, Any], column: Any, pair: Any) -> LabeledText:
    second = given.get(pair) if pair is not None else None
    text = row_text({key: value for key, value in given.items() if key != pair}, column, row.where)
    if pair is not None and (not isinstance(second, str) or not second.strip()):
        raise row.error(f"its {pair} is missing or empty")
    if not text.strip():
        raise row.error("its text is empty")
    second = None if second is None else row.valid_text(second, str(pair))
    return LabeledText(row.where, row.valid_text(text, "text"), second, None)


def _require_label(row: SourceRow, value: Any) -> None:
    """Raises BadRowError if a value cannot be a label."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise row.error("it has no label")
    if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise row.error(
            f"its label is {value!r}, but must be a string, a finite number, true, false, or a list of these"
        )
    if isinstance(value, str):
        row.valid_text(value, "label")


def label_name(value: Any) -> str:
    """Returns the name of a label, which is the same for 1, 1.0 and "1"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


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
    texts: Sequence[LabeledText], labels: Labels, bad_rows: BadRows
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


def number_label_columns(data: Data) -> tuple[Data, str | None]:
    """Sets data.text_column and data.label_column to column numbers if no table has a header.

    Returns the settings and a message about the columns, or None if nothing was set. Raises ConfigError if a first line
    looks like data but the columns are unclear, or if it is a header although columns are set by number.
    """
    files = local_files(data, text_rows=True)
    tables = [path for path in files if file_form(path) in TABLES]
    require_no_header(data)
    if not data.has_header or not tables:
        return data, None
    texts = TEXT_NAMES if data.text_column is None else (data.text_column,)
    labels = LABEL_COLUMNS if data.label_column is None else (data.label_column,)
    pair = PAIR_COLUMN if data.text_pair_column is None else data.text_pair_column
    unnamed = [first for path in tables if (first := FirstLine.of(path, (*texts, *labels, pair)))]
    suspect = next((first for first in unnamed if first.looks_like_data), None)
    if suspect is None:
        return data, None
    label = suspect.label_column
    is_named = any(column is not None for column in (data.text_column, data.label_column, data.text_pair_column))
    agree = len(unnamed) == len(files) and all(first.label_column == label for first in unnamed)
    if label is not None and agree and not is_named:
        update = {"text_column": 1 - label, "label_column": label}
        columns = f"text = column {1 - label}, label = column {label}"
        return data.model_copy(
            update=update
        ), f"{suspect.path}: its first line looks like data, so the file is read without a header: {columns}"
    numbers = (
        "set data.text_column and data.label_column to the numbers of their columns"
        if label is None
        else f"set data.text_column to {1 - label} and data.label_column to {label}"
    )
    raise suspect.refusal(f"{numbers} if no file has a header, or add a first line with the names of the columns")

"""Predicts rows of a dataset, or one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.data.formats.names import file_form
from sansgpu.data.forms.files import file_notes
from sansgpu.data.rows import LocatedRow, SourceRow
from sansgpu.data.sources import local_files, open_single
from sansgpu.data.tables import Columns, require_no_header
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.machine.probe import has_bf16_tensors
from sansgpu.models.modules import narrow_matrices
from sansgpu.tasks.inference import predictions
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest, open_model

Row = dict[str, Any]


class PredictedRows(NamedTuple):
    """The predictions of rows, and a function that turns one into text."""

    rows: Iterator[Row]
    in_words: Callable[[Row], str]


def predict(
    model: ModelRequest, data: str | Row, warn: Warn, progress: ReportProgress, **options: Any
) -> PredictedRows:
    """Loads a model and predicts each row, in order. `data` is the name of a dataset, or one row.

    `options` are passed to the model's task. Raises ConfigError if the task predicts nothing. Rows are read and
    predicted in chunks while the result is consumed, which raises ConfigError if there are none, or one is invalid.
    """
    loaded = open_model(model, "predict", warn, progress)
    if unknown := next((name for name in options if name not in signature(loaded.task_class.predict).parameters), None):
        raise ConfigError(f"{_flags([unknown])} has no effect for a model of task {loaded.config.task}; remove it.")
    if isinstance(data, str):
        for note in file_notes(loaded.config.data.for_dataset(data), loaded.config.settings.rows):
            warn(note)
        rows: Iterator[Row] = rows_of(data, loaded.config.data, warn, loaded.task_class.rows_to_predict)
    else:
        rows, loaded = iter([data]), _for_single_row(loaded, data)
    if has_bf16_tensors(loaded.precision):
        narrow_matrices(loaded.objective.model, torch.nn.Linear)  # embeddings stay as they are, as with autocast
    progress("predicting", 0, 0)
    return PredictedRows(predictions(loaded, rows, **options), loaded.task_class.in_words)


def _for_single_row(loaded: TrainedModel, row: Row) -> TrainedModel:
    """Returns the model, set up for the columns of one row that were given as flags.

    Raises ConfigError if its task needs different columns.
    """
    data, target = loaded.config.data, loaded.source.target
    pairs = data.text_pair_column is not None
    choices = [columns for columns in loaded.task_class.flag_columns if not pairs or len(columns) > 1]
    if tuple(row) not in choices:
        task = f"task {loaded.config.task}{' on pairs of texts' if pairs else ''}"
        usable = " or ".join(map(_flags, choices))
        known = "is" if loaded.source.config or loaded.task_class.recognizes(target) else "can only be used as"
        raise ConfigError(f"{target} {known} a model of {task}; pass {usable} instead of {_flags(tuple(row))}.")
    named = loaded.config.with_values("data", text_column=None, text_pair_column=None, label_column=None)
    return replace(loaded, config=named)


def _flags(columns: Sequence[str]) -> str:
    return " with ".join("--" + name.replace("_", "-") for name in columns)


def rows_of(
    name: str, data: DataConfig, warn: Warn, each: Callable[[Iterable[SourceRow]], Iterable[SourceRow]] = iter
) -> Iterator[LocatedRow]:
    """Yields the rows of a dataset, with the columns that `data` names; each line of a text file is a row.

    `each` turns the rows of the dataset into those that get a prediction each. Raises ConfigError if there are none, or
    one is not an object.
    """
    form = {} if file_form(Path(name)) is None else {"tag_column": None}  # formats may differ from training
    data = data.for_dataset(name).model_copy(update=form)
    require_no_header(local_files(data, text_rows=True), Columns.of(data))
    source = open_single(name, data, text_rows=True)
    for note in source.notes:
        warn(f"{name}: {note}")
    row = None
    for row in each(source.rows()):
        if not isinstance(row.readable_value(), dict):
            raise row.error("it is not an object with columns")
        yield LocatedRow(row)
    if row is None:
        raise ConfigError(f"{name} has no rows; pass a file with at least one.")

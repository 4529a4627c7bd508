"""Finds the columns of the text and its label in tables without a header."""

from __future__ import annotations

from sansgpu.config import DataConfig
from sansgpu.data.files import file_form
from sansgpu.data.headers import TABLES, FirstLine, require_no_header
from sansgpu.data.rows import LABEL_COLUMNS, TEXT_NAMES
from sansgpu.data.sources import local_files
from sansgpu.tasks.classify.labels import PAIR_COLUMN


def number_label_columns(data: DataConfig) -> tuple[DataConfig, str | None]:
    """Returns the settings with the numbers of the columns of the text and its label, and a clause on what they are.

    Both are set only if no table has a header, and None is returned if there was nothing to set. Raises ConfigError if
    a first line looks like data, but the columns are unclear, or if it names columns that are set by number.
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
        return data.model_copy(update=update), f"{suspect.path}: its first line is data, so it has no header: {columns}"
    numbers = (
        "set data.text_column and data.label_column to the numbers of their columns"
        if label is None
        else f"set data.text_column to {1 - label} and data.label_column to {label}"
    )
    raise suspect.refusal(f"{numbers} if no file has a header, or add a first line with the names of the columns")

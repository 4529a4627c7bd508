"""Refuses tables of texts whose first line may be data."""

from __future__ import annotations

from sansgpu.config import DataConfig
from sansgpu.data.files import file_form
from sansgpu.data.headers import TABLES, FirstLine
from sansgpu.data.sources import local_files
from sansgpu.tasks.embed.rows import PAIR_COLUMNS, SCORE_COLUMNS, TEXT_COLUMNS


def require_embedding_columns(data: DataConfig) -> None:
    """Raises ConfigError if the first line of a table looks like data, but the columns are looked up by name."""
    chosen = (data.text_column, data.text_pair_column, data.label_column)
    named = [column for column in chosen if column is not None]
    names = named or [*PAIR_COLUMNS, *SCORE_COLUMNS, *(name for pair in TEXT_COLUMNS for name in pair)]
    tables = [path for path in local_files(data, text_rows=True) if file_form(path) in TABLES]
    for path in tables if data.has_header else ():
        first = FirstLine.of(path, names)
        if first is not None and first.looks_like_data:
            raise first.refusal(
                "set data.text_column, data.text_pair_column and data.label_column to the numbers of their columns, or "
                "add a first line with names such as text1, text2 and score"
            )

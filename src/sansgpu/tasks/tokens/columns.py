"""Finds the column of the tags in files of words with tags."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.conll import DEFAULT_TAG_COLUMN, conll_columns
from sansgpu.data.files import file_form, read_lines
from sansgpu.data.headers import MAX_LINES, TABLES
from sansgpu.data.sources import local_files
from sansgpu.tasks.tokens.tagged import TAG_COLUMNS

TAGGED_FORMS = (*TABLES, ".txt")  # files that may contain CoNLL columns, in addition to .conll
TAGGED_NAMES = frozenset(("text", "tokens", "spans", *TAG_COLUMNS))


def number_tag_column(data: DataConfig) -> tuple[DataConfig, str | None]:
    """Returns the settings with the number of the column of the tags, and a clause on what the columns are.

    It is set only if every file has CoNLL columns, and None is returned if there was nothing to set. Raises ConfigError
    if a table has none, because only they can hold tags.
    """
    files = local_files(data)
    others = [path for path in files if file_form(path) in TAGGED_FORMS]
    if data.tag_column is not None or not others:
        return data, None
    wrong = [path for path in others if not _has_tagged_words(path)]
    if table := next((path for path in wrong if file_form(path) in TABLES), None):
        raise ConfigError(
            f"{table} is a table, which cannot hold lists of tokens and tags, and it does not look like CoNLL columns, "
            "one word with its tag per line and an empty line after each sentence; if it has them nevertheless, set "
            "data.tag_column to the number of the column of the tags, or -1 for the last."
        )
    if wrong or any(file_form(path) not in (*TAGGED_FORMS, ".conll") for path in files):
        return data, None
    columns = f"word = column 0, tag = column {DEFAULT_TAG_COLUMN}, the last"
    clause = f"{others[0]}: its lines are words with their tags, so it is read as CoNLL columns: {columns}"
    return data.model_copy(update={"tag_column": DEFAULT_TAG_COLUMN}), clause


def _has_tagged_words(path: Path) -> bool:
    """Returns whether a file has sentences of words with tags: the first tag and an empty line occur among others."""
    first: list[str] = []
    has_ends = is_repeated = False
    for line in islice(read_lines(path, blank=True), MAX_LINES):
        columns = [] if line.problem else conll_columns(line.value)
        if not first:
            first = columns
            if len(first) == 1 and first[0] != "-DOCSTART-":
                return False
            first = [] if len(first) == 1 else first
        elif not columns:
            has_ends = has_ends or not line.problem
        elif columns[0] != first[0] and columns[-1] == first[-1]:
            is_repeated = True
        if has_ends and is_repeated:
            return not {value.casefold() for value in first} & TAGGED_NAMES
    return False

"""Finds tables whose lines are triples without a header."""

from __future__ import annotations

from pathlib import Path

from sansgpu.config import DataConfig
from sansgpu.data.files import file_form
from sansgpu.data.headers import TABLES, FirstLine, table_lines
from sansgpu.data.sources import local_files
from sansgpu.tasks.graph.rows import FACT_KEYS, ROW_KEYS


def require_triples_or_columns(data: DataConfig) -> None:
    """Raises ConfigError if a table's lines may be triples, but not clearly."""
    for path in local_files(data):
        has_bare_triples(path, data)


def has_bare_triples(path: Path, data: DataConfig) -> bool:
    """Returns whether each line of a table is a head, a relation and a tail, without a header.

    Raises ConfigError if its first line looks like that, but not clearly.
    """
    if file_form(path) not in TABLES or not data.has_header:
        return False
    first = FirstLine.of(path, ROW_KEYS if data.text_column is None else (*ROW_KEYS, data.text_column))
    if first is None or len(first.values) != len(FACT_KEYS) or not first.looks_like_data:
        return False
    if _is_triple(path, first.values):
        return True
    raise first.refusal(
        f"if its lines are triples, add a first line with the names {', '.join(FACT_KEYS)}; otherwise one with the "
        "names of the columns"
    )


def _is_triple(path: Path, first: tuple[str, ...]) -> bool:
    """Returns whether the relation of the first line occurs again, and so does its head or tail, or it is no name."""
    head, relation, tail = first
    has_relation, has_end = False, any(_is_no_name(end) for end in (head, tail))
    for line in table_lines(path):
        if line != first and len(line) == len(first):
            has_relation = has_relation or line[1] == relation
            has_end = has_end or bool({head, tail} & {line[0], line[2]})
        if has_relation and has_end:
            return True
    return False


def _is_no_name(value: str) -> bool:
    """Returns whether a value cannot be the name of a column: it has several words, or begins with no letter."""
    return len(value.split()) > 1 or not (value[:1].isalpha() or value[:1] == "_")

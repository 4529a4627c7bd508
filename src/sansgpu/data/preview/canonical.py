"""Writes typed rows in one form for each kind of row, as `sansgpu data --write` does."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sansgpu.data.forms.form import Forms
from sansgpu.data.forms.offsets import Offsets, SpannedText
from sansgpu.data.preview.row_types import row_type
from sansgpu.data.rows import BadRowError, SourceRow

# Fields that say where a row was, or what was corrected in it, which is not corrected again.
_NOT_CONTENT = ("where", "moved_spans", "dropped_spans", "given_words")


def canonical_row(forms: Forms[Any], row: SourceRow, typed: Any) -> Any:
    """Returns the value of a row in the canonical form, from which its task reads an equal typed row.

    A row for which the canonical form has no place keeps its own columns.
    """
    for candidate in row_type(typed).columns(typed):
        try:
            if same_content(forms.read(SourceRow(row.where, candidate)), typed):
                return candidate
        except BadRowError:
            continue
    return row.value


def same_content(one: Any, other: Any) -> bool:
    """Returns whether two typed rows are equal, wherever they come from."""
    one, other = _tagged_words(one), _tagged_words(other)
    return type(one) is type(other) and bool(_content(one) == _content(other))


def _tagged_words(typed: Any) -> Any:
    """Returns the words of a text with spans, whose offsets count characters in the canonical form."""
    return typed.tagged(Offsets()) if isinstance(typed, SpannedText) else typed


def _content(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value) if field.name not in _NOT_CONTENT)
        return {name: _content(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_content(item) for item in value] if isinstance(value, tuple) else value

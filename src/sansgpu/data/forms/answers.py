"""Right answers to prompts, under the names that public data sets give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sansgpu.data.forms.cells import parsed_cell

# In the order in which they are tried. `solution` comes last, because it may be a whole derivation.
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "reward_model", "solution")
_INNER = "ground_truth"  # the answer within the object `reward_model`, as in verl's rows


def answer_column(columns: Mapping[Any, Any]) -> str | None:
    """Returns the column with the right answer, or None if the row has none."""
    return next((column for column in ANSWER_COLUMNS if _value(columns, column) is not None), None)


def right_answer(columns: Mapping[Any, Any]) -> Any:
    """Returns the right answer, or None if the row has none."""
    column = answer_column(columns)
    return None if column is None else _value(columns, column)


def _value(columns: Mapping[Any, Any], column: str) -> Any:
    value = columns.get(column)
    if column == "reward_model":
        value = parsed_cell(value)  # a table has it as text
        value = value.get(_INNER) if isinstance(value, dict) else None
    return None if isinstance(value, str) and not value.strip() else value

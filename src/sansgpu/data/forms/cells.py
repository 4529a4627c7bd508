"""Lists and objects that tables hold as text in their cells."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

MAX_CELL_CHARACTERS = 1 << 20  # of a list or object; longer cells are texts
_ARRAY = re.compile(r"array\((\[.*?\])(?:, dtype=\w+)?\)", re.DOTALL)  # a list that pandas has written to a CSV file


def parsed_cell(value: Any) -> Any:
    """Returns the list or object that a text holds as JSON or in Python's notation; other values unchanged."""
    if not isinstance(value, str) or len(value) > MAX_CELL_CHARACTERS:
        return value
    text = value.strip()
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return value
    for parse in (json.loads, ast.literal_eval, lambda cell: ast.literal_eval(_ARRAY.sub(r"\1", cell))):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return value

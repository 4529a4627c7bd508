"""Lists and objects that tables hold as text in their cells."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

MAX_CELL_CHARACTERS = 1 << 20  # of a list or object; longer cells are texts
DECIMAL_COMMA = re.compile(r"[+-]?\d+,(\d{1,2}|\d{4,})")  # with three digits, it could separate thousands
_ARRAY = re.compile(r"\barray\((\[.*?\])(?:,\s*dtype=[^()\[\]]+)?\)", re.DOTALL)  # a list that pandas has written
_SCALAR = re.compile(r"\bnp\.\w+\(([^()]*)\)")  # an item of a list that NumPy 2 has written
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM = re.compile(rf"{_QUOTED}|[+-]?(?:0|[1-9]\d*)\.?\d*(?:e[+-]?\d+)?|True|False|None")
_NUMPY_LIST = re.compile(rf"\[\s*(?:{_ITEM.pattern})(?:\s+(?:{_ITEM.pattern}))+\s*\]", re.DOTALL)  # has no commas


def with_point(text: str) -> str:
    """Returns a number with a decimal comma with a point instead; other texts unchanged."""
    return text.replace(",", ".") if DECIMAL_COMMA.fullmatch(text) else text


def parsed_cell(value: Any) -> Any:
    """Returns the list or object that a text holds as JSON, Python, NumPy or pandas write it; others unchanged."""
    if not isinstance(value, str) or len(value) > MAX_CELL_CHARACTERS:
        return value
    text = value.strip()
    if text.startswith("array("):
        text = _ARRAY.sub(r"\1", text)
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return value
    for parse in (json.loads, _numpy_list, ast.literal_eval, _python_value):
        try:
            return parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return value


def _numpy_list(text: str) -> list[Any]:
    """Parses a list without commas, whose adjacent strings would be a single one in Python."""
    if not _NUMPY_LIST.fullmatch(text):
        raise ValueError("not a list as NumPy writes it")
    return [ast.literal_eval(item) for item in _ITEM.findall(text)]


def _python_value(text: str) -> Any:
    """Parses a list or object with arrays or numbers of NumPy."""
    return ast.literal_eval(_SCALAR.sub(r"\1", _ARRAY.sub(r"\1", text)))

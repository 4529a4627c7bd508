"""Lists and objects that tables hold as text in their cells."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

MAX_PYTHON_VALUES = 1 << 18  # commas of a text in Python's notation, which takes hundreds of bytes for each value
MAX_ARRAY_CHARACTERS = 1 << 20  # length of a text with arrays; NumPy abbreviates long ones
DECIMAL_COMMA = re.compile(r"[+-]?\d+,(\d{1,2}|\d{4,})")  # with three digits, it could separate thousands
_ARRAY = re.compile(r"\barray\((\[.*?\])(?:,\s*dtype=[^()\[\]]+)?\)", re.DOTALL)  # a list that pandas has written
_SCALAR = re.compile(r"\bnp\.\w+\(([^()]*)\)")  # an item of a list that NumPy 2 has written
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM = re.compile(rf"{_QUOTED}|[+-]?(?:0|[1-9]\d*)(?:\.\d*)?(?:e[+-]?\d+)?|True|False|None")
_NUMPY_LIST = re.compile(rf"\[\s*(?:{_ITEM.pattern})(?:\s+(?:{_ITEM.pattern}))+\s*\]", re.DOTALL)  # has no commas


def with_point(text: str) -> str:
    """Returns a number with a decimal comma with a point instead; other texts unchanged."""
    return text.replace(",", ".") if DECIMAL_COMMA.fullmatch(text) else text


def finite_number(value: Any) -> float | None:
    """Returns a number, which may be a text with a decimal point or comma; None for other values."""
    try:
        number = float(with_point(value.strip()) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and not isinstance(value, bool) else None


def parsed_cell(value: Any) -> Any:
    """Returns the list or object that a text holds as JSON, Python, NumPy or pandas write it; others unchanged."""
    found = parsed_text(value) if isinstance(value, str) else None
    return found if isinstance(found, (list, dict)) else value


def parsed_text(text: str) -> list[Any] | dict[Any, Any] | tuple[Any, ...] | set[Any] | None:
    """Returns what a text holds like `parsed_cell`, or a tuple or set of Python; None for other texts.

    The text may also be a JSON string with such a text.
    """
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "{}", "()", '""') and not text.startswith("array("):
        return None
    for parse in _parsers(text):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        found = parsed_text(found) if isinstance(found, str) else found
        if isinstance(found, (list, dict, tuple, set)):
            return found
    return None


def _parsers(text: str) -> Iterator[Callable[[str], Any]]:
    has_arrays = len(text) <= MAX_ARRAY_CHARACTERS
    yield json.loads
    if has_arrays:
        yield _numpy_list
    if text.count(",") <= MAX_PYTHON_VALUES:
        yield _python_value
    if has_arrays:
        yield _with_arrays


def _numpy_list(text: str) -> list[Any]:
    """Parses a list without commas, whose adjacent strings would be a single one in Python."""
    if not _NUMPY_LIST.fullmatch(text):
        raise ValueError("not a list as NumPy writes it")
    return [ast.literal_eval(item) for item in _ITEM.findall(text)]


def _python_value(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings that are not Python
        return ast.literal_eval(text)


def _with_arrays(text: str) -> Any:
    """Parses a list or object with arrays or numbers of NumPy."""
    return _python_value(_SCALAR.sub(r"\1", _ARRAY.sub(r"\1", text)))

"""Reads JSON from generated text, and values that lack quotes, with the help of a JSON schema."""

from __future__ import annotations

import json
import math
from typing import Any

_CONSTANTS = {"True": True, "False": False, "None": None}  # as Python, and so some chat templates, write them


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number} is too large")
    return value


# Models write line breaks in strings, which strict JSON does not allow.
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)


def decode_json(text: str, start: int) -> tuple[Any, int] | None:
    """Returns the JSON value that starts at a place of a text, and where it ends; None if there is none."""
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def typed(text: str, schema: Any) -> Any:
    """Returns the value that a text stands for according to a schema; the text itself if it fits none of its types.

    Without types, a text that is JSON stands for its value.
    """
    types, body = _types(schema), text.strip()
    found = decode_json(body, 0)
    if body in _CONSTANTS:
        found = _CONSTANTS[body], len(body)
    if found is None or found[1] < len(body):
        return text
    value = found[0]
    if not types:
        return text if isinstance(value, str) else value  # strings are written without quotes
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if _type_of(value) & types else text


def _type_of(value: Any) -> set[str]:
    """Returns the types of JSON schemas to which a value belongs, except `string`, whose values are not JSON here."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return set()


def _types(schema: Any) -> set[str]:
    """Returns the types that a schema allows; an empty set if it names none."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        types |= {kind for choice in (choices if isinstance(choices, list) else ()) for kind in _types(choice)}
    values = schema.get("enum")
    if not types and isinstance(values, list):
        types = {kind for value in values for kind in (_type_of(value) or {"string"})}
    return types | ({"null"} if schema.get("nullable") is True and types else set())

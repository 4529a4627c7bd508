"""Reads calls of functions in Python's syntax."""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

from sansgpu.models.generation.calls import NAME, FoundCall, InferredSyntax, Schemas, ToolCall, skip_space
from sansgpu.models.generation.typed_values import decode_json


@dataclass(frozen=True)
class PythonCall:
    """A call in Python with named arguments, as of Llama 4, LFM2 and OLMo 3: `name(key="value")`.

    Values may be JSON or Python literals.
    """

    starts_with_name = True

    @classmethod
    def infer(cls, written: str, known: ToolCall) -> InferredSyntax | None:
        for name in re.finditer(re.escape(known.name) + r"(?=\()", written):
            found = cls().read(written, name.start(), {})
            if found is not None and found.call == known:
                return InferredSyntax(cls(), name.start(), found.end)
        return None

    def read(self, text: str, start: int, schemas: Schemas) -> FoundCall | None:
        head = re.compile(NAME + r"\(\s*").match(text, start)
        if head is None:
            return None
        place, arguments = head.end(), dict[str, Any]()
        key = re.compile(r"\s*(\w+)\s*=\s*")
        while not text.startswith(")", place):
            named = key.match(text, place)
            found = None if named is None else _literal_at(text, named.end())
            if named is None or found is None:
                return None
            arguments[named[1]], place = found
            if text.startswith(",", place):
                place = skip_space(text, place + 1)
        return FoundCall(ToolCall(head[1], arguments), place + 1)


def _literal_at(text: str, start: int) -> tuple[Any, int] | None:
    """Returns the JSON or Python value that starts at a place and ends before a comma or bracket, and that place."""
    if (found := decode_json(text, start)) is not None:
        end = skip_space(text, found[1])
        if text.startswith((",", ")"), end):
            return found[0], end
    if (stop := _value_end(text, start)) is None:
        return None
    value = _python_value(text[start:stop])
    return None if value is None else (value[0], stop)


def _value_end(text: str, start: int) -> int | None:
    """Returns the place of the first comma or closing bracket that is not inside a Python value; None if none is."""
    depth, quote, place = 0, "", start
    while place < len(text):
        character = text[place]
        if quote:
            place += character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif depth == 0 and character in ",)":
            return place
        elif character in ")]}":
            depth -= 1
        place += 1
    return None


def _python_value(text: str) -> tuple[Any] | None:
    """Returns a Python literal, in which the names of JSON's constants are allowed, as JSON values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings that are not Python
            whole = _STRING.sub(lambda one: one[0].replace("\r", "\\r").replace("\n", "\\n"), text.strip())
            tree = _JsonConstants().visit(ast.parse(whole, mode="eval"))
        return (json.loads(json.dumps(ast.literal_eval(tree), allow_nan=False)),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


_STRING = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)  # models write line breaks in strings


class _JsonConstants(ast.NodeTransformer):
    """Replaces the names of JSON's constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node

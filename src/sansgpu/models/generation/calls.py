"""Calls of functions by a model, and what the syntaxes in which models write them have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Schemas = Mapping[str, Mapping[str, Any]]  # names of functions -> JSON schemas of their arguments
NAME = r"([\w.\-/:]+)"  # of a function or an argument


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by an answer."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        values = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.arguments.items())
        return f"{self.name}({', '.join(values)})"

    def as_message(self) -> dict[str, Any]:
        """Returns the call as an element of a message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class FoundCall(NamedTuple):
    """A call in a text, and where it ends."""

    call: ToolCall
    end: int


class CallSyntax(Protocol):
    """Reads a call in one syntax."""

    starts_with_name: bool

    def read(self, text: str, start: int, schemas: Schemas) -> FoundCall | None:
        """Returns the call that starts at a place of a text; None if there is none, or only a part of it."""


class InferredSyntax(NamedTuple):
    """A syntax, and where it writes a known call in a text."""

    syntax: CallSyntax
    start: int
    end: int


def literal(text: str) -> str:
    """Returns a regular expression for a text in which the amount of white space and numbers may differ."""
    parts = (part for part in re.split(r"(\s+|\d+)", text) if part)
    return "".join(r"\s*" if part.isspace() else r"\d+" if part.isdigit() else re.escape(part) for part in parts)


def skip_space(text: str, start: int) -> int:
    """Returns the place of the next character that is not white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start

"""The syntaxes in which models write calls of functions. Each is inferred from a known call, and reads others.

SYNTAXES is the table of them. A syntax covers a call from its name, or from the object that contains the name, to the
end of its arguments. The texts around it belong to the form; see `call_form`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sansgpu.models.generation.calls import (
    NAME,
    FoundCall,
    InferredSyntax,
    Schemas,
    ToolCall,
    literal,
    skip_space,
)
from sansgpu.models.generation.python_call import PythonCall
from sansgpu.models.generation.typed_values import DECODER, decode_json, typed


@dataclass(frozen=True)
class JsonCall:
    """A JSON object with the name and the arguments, as of Hermes, Llama 3 and Mistral.

    They may be inside another object, under the key `inside`.
    """

    name_key: str
    arguments_key: str
    inside: str | None = None
    starts_with_name = False

    @classmethod
    def infer(cls, written: str, known: ToolCall) -> InferredSyntax | None:
        for start in (found.start() for found in re.finditer(r"\{", written[: max(0, written.find(known.name))])):
            try:
                value, end = DECODER.raw_decode(written, start)
            except ValueError:
                continue
            for inside, part in ((None, value), *((k, v) for k, v in value.items() if isinstance(v, dict))):
                name = next((key for key, one in part.items() if one == known.name), None)
                arguments = next((key for key, one in part.items() if _as_object(one) == known.arguments), None)
                if name is not None and arguments is not None:
                    return InferredSyntax(cls(name, arguments, inside), start, end)
        return None

    def read(self, text: str, start: int, schemas: Schemas) -> FoundCall | None:
        found = decode_json(text, start)
        if found is None or not isinstance(found[0], dict):
            return None
        value = found[0] if self.inside is None else found[0].get(self.inside)
        match value:
            case {self.name_key: str(name), self.arguments_key: arguments} if name:
                known = _as_object(arguments)
                return None if known is None else FoundCall(ToolCall(name, known), found[1])
        return None


def _as_object(value: Any) -> dict[str, Any] | None:
    """Returns arguments, which may be JSON text of an object; None if they are something else."""
    if isinstance(value, str) and (found := decode_json(value, 0)) is not None and not value[found[1] :].strip():
        value = found[0]
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class NamedJson:
    """A name, one of the texts `between`, and a JSON object of the arguments, as of DeepSeek, Kimi and gpt-oss."""

    between: tuple[str, ...]
    starts_with_name = True

    @classmethod
    def infer(cls, written: str, known: ToolCall) -> InferredSyntax | None:
        for name in re.finditer(re.escape(known.name), written):
            start = written.find("{", name.end())
            found = None if start < 0 else decode_json(written, start)
            if found is not None and found[0] == known.arguments:
                return InferredSyntax(cls((written[name.end() : start],)), name.start(), found[1])
        return None

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return re.compile(rf"{NAME}(?:{'|'.join(map(literal, self.between))})\s*(?=\{{)")

    def read(self, text: str, start: int, schemas: Schemas) -> FoundCall | None:
        head = self._head.match(text, start)
        found = None if head is None else decode_json(text, head.end())
        if head is None or found is None:
            return None
        return FoundCall(ToolCall(head[1], found[0]), found[1])


@dataclass(frozen=True)
class BareKeys:
    """A name and an object whose keys lack quotes, and whose strings are between `quote`, as of FunctionGemma."""

    quote: str
    starts_with_name = True

    @classmethod
    def infer(cls, written: str, known: ToolCall) -> InferredSyntax | None:
        (key, value), *_ = known.arguments.items()
        shape = rf"{re.escape(known.name)}\{{\s*{re.escape(key)}:\s*(\S+?){re.escape(value)}\1"
        for found in re.finditer(shape, written):
            read = cls(found[1]).read(written, found.start(), {})
            if read is not None and read.call == known:
                return InferredSyntax(cls(found[1]), found.start(), read.end)
        return None

    def read(self, text: str, start: int, schemas: Schemas) -> FoundCall | None:
        name = re.compile(NAME + r"(?=\{)").match(text, start)
        if name is None:
            return None
        try:
            arguments, end = self._value(text, name.end())
        except (ValueError, RecursionError):
            return None
        return FoundCall(ToolCall(name[1], arguments), end)

    def _value(self, text: str, start: int) -> tuple[Any, int]:
        """Returns the value that starts at a place, and where it ends. Raises ValueError."""
        start = skip_space(text, start)
        if text.startswith(self.quote, start):
            begin = start + len(self.quote)
            end = text.index(self.quote, begin)
            return text[begin:end], end + len(self.quote)
        if text.startswith("{", start):
            pairs, end = self._items(text, start, "}")
            return dict(pairs), end
        if text.startswith("[", start):
            return self._items(text, start, "]")
        return DECODER.raw_decode(text, start)

    def _items(self, text: str, start: int, closing: str) -> tuple[list[Any], int]:
        items, place = list[Any](), skip_space(text, start + 1)
        while not text.startswith(closing, place):
            if closing == "}":
                key, place = self._key(text, place)
                value, place = self._value(text, place)
                items.append((key, value))
            else:
                value, place = self._value(text, place)
                items.append(value)
            place = skip_space(text, place)
            if text.startswith(",", place):
                place = skip_space(text, place + 1)
            elif not text.startswith(closing, place):
                raise ValueError("a comma is missing")
        return items, place + 1

    def _key(self, text: str, start: int) -> tuple[str, int]:
        if text.startswith(self.quote, start):
            key, end = self._value(text, start)
            return key, text.index(":", end) + 1
        end = text.index(":", start)
        return text[start:end].strip(), end + 1


@dataclass(frozen=True)
class MarkedValues:
    """A name, and keys and values between texts, as of Qwen3-Coder, GLM-4.5 and MiniMax-M2.

    The values are typed by the schema of the function, because strings lack quotes. `first` is between the name and the
    first key, `assign` between a key and its value, and `next` between a value and the next key. `last` follows the
    last value, and `empty` the name if there are no arguments; None: unknown. One of `after` follows them.
    """

    first: str
    assign: str
    next: str
    last: str
    empty: str | None
    after: tuple[str, ...]
    starts_with_name = True

    @classmethod
    def infer(cls, written: str, known: ToolCall) -> InferredSyntax | None:
        """Leaves the texts after the last value to `with_ends`."""
        parts = [part for item in known.arguments.items() for part in item]
        shape = re.escape(known.name) + "".join(rf"(.+?){re.escape(part)}" for part in parts)
        found = re.search(shape, written, re.DOTALL)
        if found is None or not all(part.strip() for part in found.groups()):
            return None
        first, assign, following, again = found.groups()
        if assign != again:
            return None
        return InferredSyntax(cls(first, assign, following, "", None, ()), found.start(), found.end())

    def with_ends(self, closing: str, empty: str | None, separator: str) -> tuple[MarkedValues, str, str]:
        """Returns the syntax, and the closing and separator without the text that belongs to the arguments.

        `closing` and `separator` follow the last value, and `empty` a name without arguments.
        """
        shared = closing if empty is None else _common_suffix(closing, empty)
        last = closing.removesuffix(shared)
        rest = separator.removeprefix(last)
        ends = None if empty is None else empty.removesuffix(shared)
        return replace(self, last=last, empty=ends, after=tuple(filter(None, (shared, rest)))), shared, rest

    @cached_property
    def _key(self) -> str:
        edge = len(self.assign.rstrip())
        return rf"\s*([^\n]+?){literal(self.assign[:edge])}{_edge(self.assign[edge:])}"

    @cached_property
    def _first_key(self) -> re.Pattern[str]:
        return re.compile(literal(self.first.rstrip()) + self._key)

    @cached_property
    def _value(self) -> re.Pattern[str]:
        following = _edged(self.next) + self._key
        return re.compile(rf"(.*?)(?:{following}|{_edged(self.last)}(?={self._after}))", re.DOTALL)

    @cached_property
    def _after(self) -> str:
        return "|".join([r"\s*\Z", *(r"\s*" + literal(text.strip()) for text in self.after if text.strip())])

    def read(self, text: str, start: int, schemas: Schemas) -> FoundCall | None:
        name = re.compile(NAME).match(text, start)
        if name is None:
            return None
        properties = schemas.get(name[1], {}).get("properties")
        kinds = properties if isinstance(properties, dict) else {}
        arguments, key = dict[str, Any](), self._first_key.match(text, name.end())
        if key is None:
            empty = None if self.empty is None else re.compile(rf"{literal(self.empty)}(?={self._after})")
            end = None if empty is None else empty.match(text, name.end())
            return None if end is None else FoundCall(ToolCall(name[1], {}), end.end())
        argument, place = key[1], key.end()
        while (found := self._value.match(text, place)) is not None:
            arguments[argument] = typed(found[1], kinds.get(argument))
            place = found.end()
            if found[2] is None:
                return FoundCall(ToolCall(name[1], arguments), place)
            argument = found[2]
        return None


def _common_suffix(one: str, other: str) -> str:
    pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
    length = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[len(one) - length :]


def _edge(space: str) -> str:
    """Returns a regular expression for white space next to a value, which must stay apart from that of the value."""
    return f"(?:{re.escape(space)})?" if space else ""


def _edged(text: str) -> str:
    """Returns a regular expression for a text after a value."""
    body = text.lstrip()
    return _edge(text[: len(text) - len(body)]) + literal(body)


# In the order in which they are tried, because later ones also match calls of earlier ones.
SYNTAXES: tuple[Any, ...] = (JsonCall, PythonCall, BareKeys, NamedJson, MarkedValues)


def infer_syntax(written: str, known: ToolCall) -> InferredSyntax | None:
    """Returns the first syntax that reads a known call from a text; None if there is none."""
    return next((found for one in SYNTAXES if (found := one.infer(written, known)) is not None), None)

"""Renders the part of Go's template language that chat templates of Ollama use."""

from __future__ import annotations

import ast
import re
from collections import ChainMap
from collections.abc import Sequence
from typing import Any, NamedTuple

_ACTION = re.compile(r"\s*\{\{-\s+(.*?)\s*\}\}|\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|:=|[()=,]|[^\s()=:,"]+')


class Node(NamedTuple):
    """A text, an action, or a block with branches: (condition, nodes)."""

    kind: str
    text: str = ""
    branches: tuple[tuple[str, list[Node]], ...] = ()


class _Continue(Exception):  # noqa: N818
    pass


def render(template: str, messages: Sequence[dict[str, str]]) -> str:
    """Returns the prompt for a conversation, as Ollama builds it."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    turns = [{"Role": message["role"], "Content": message["content"]} for message in messages]
    data = {"System": system, "Messages": turns, "Response": ""}
    nodes, rest = _parse(_tokens(template))
    assert not rest
    out: list[str] = []
    _run(nodes, data, ChainMap({"$": data}), out)
    return "".join(out)


def _tokens(template: str) -> list[Node]:
    found, place = [], 0
    for action in _ACTION.finditer(template):
        found.append(Node("text", template[place : action.start()]))
        found.append(Node("action", action[1] if action[1] is not None else action[2]))
        place = action.end()
    return [*found, Node("text", template[place:])]


def _parse(tokens: list[Node]) -> tuple[list[Node], list[Node]]:
    """Returns the nodes up to an `else` or `end`, and the tokens from there."""
    nodes: list[Node] = []
    while tokens:
        first, word = tokens[0], tokens[0].text.partition(" ")[0]
        if first.kind == "action" and word in ("else", "end"):
            break
        tokens = tokens[1:]
        if first.kind == "text" or word not in ("if", "range"):
            nodes.append(first)
            continue
        branches = []
        condition = first.text.partition(" ")[2]
        while True:
            inner, tokens = _parse(tokens)
            branches.append((condition, inner))
            ending, tokens = tokens[0].text, tokens[1:]
            if ending == "end":
                break
            condition = ending.removeprefix("else").strip().removeprefix("if").strip() or '"always"'
        nodes.append(Node(word, "", tuple(branches)))
    return nodes, tokens


def _run(nodes: list[Node], dot: Any, names: ChainMap[str, Any], out: list[str]) -> None:
    for node in nodes:
        if node.kind == "text":
            out.append(node.text)
        elif node.kind == "action":
            _act(node.text, dot, names, out)
        elif node.kind == "if":
            taken = next((inner for condition, inner in node.branches if _value(condition, dot, names)), [])
            _run(taken, dot, names.new_child(), out)
        else:
            ((header, inner),) = node.branches
            variables, _, values = header.rpartition(":=")
            for number, value in enumerate(_value(values, dot, names)):
                scope = names.new_child(dict(zip(re.findall(r"\$\w+", variables), (number, value), strict=False)))
                try:
                    _run(inner, value, scope, out)
                except _Continue:
                    continue


def _act(action: str, dot: Any, names: ChainMap[str, Any], out: list[str]) -> None:
    if action == "continue":
        raise _Continue
    assigned = re.fullmatch(r"(\$\w+)\s*(:?=)\s*(.*)", action, re.DOTALL)
    if assigned is None:
        out.append(str(_value(action, dot, names)))
        return
    scopes = names.maps if assigned[2] == "=" else [names.maps[0]]
    scope = next((scope for scope in scopes if assigned[1] in scope), names.maps[0])
    scope[assigned[1]] = _value(assigned[3], dot, names)


def _value(text: str, dot: Any, names: ChainMap[str, Any]) -> Any:
    values, rest = _operands(_TOKEN.findall(text), dot, names)
    assert not rest, text
    return _call(values)


def _operands(tokens: list[str], dot: Any, names: ChainMap[str, Any]) -> tuple[list[Any], list[str]]:
    """Returns the operands up to a closing parenthesis, and the tokens after it."""
    values: list[Any] = []
    while tokens:
        token, tokens = tokens[0], tokens[1:]
        if token == ")":
            break
        if token == "(":
            inner, tokens = _operands(tokens, dot, names)
            values.append(_call(inner))
        elif token[0] == '"' or token.isdigit():
            values.append(ast.literal_eval(token))
        elif token[0] in ".$":
            name, *fields = token.split(".")
            value = names[name] if name else dot
            for field in filter(None, fields):
                value = value[field]
            values.append(value)
        else:
            values.append(_FUNCTIONS[token])
    return values, tokens


def _call(values: list[Any]) -> Any:
    first, *others = values
    return first(*others) if callable(first) else first


_FUNCTIONS = {
    "eq": lambda a, b: a == b,
    "len": len,
    "slice": lambda values, start: values[start:],
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "not": lambda value: not value,
    "printf": lambda form, *values: form % values,
}

"""Conversations with functions in one text with `USER:` and `ASSISTANT:` before turns, as in Glaive's data sets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sansgpu.data.forms.turns import Message
from sansgpu.data.rows import Row, SourceRow, bad_row
from sansgpu.data.tables import Columns

_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_TURN = re.compile(rf"^\s*({'|'.join(_ROLES)}):", re.MULTILINE)
_SYSTEM, _END = re.compile(r"\s*SYSTEM:\s*"), "<|endoftext|>"
_CALL = "<functioncall>"
_QUOTED = re.compile(r"""(?<="arguments":)\s*'(.*)'\s*(?=\}\s*\Z)""", re.DOTALL)  # JSON text in single quotes


def is_glaive(row: Row, columns: Columns) -> bool:
    chat = row.get("chat")
    return isinstance(chat, str) and bool(_TURN.match(chat))


def without_marks(row: SourceRow) -> Row:
    """Returns the row with `messages`, and with the functions in its system message as `tools`.

    Raises BadRowError if a call or the functions are no valid JSON.
    """
    marks = [*_TURN.finditer(row.value["chat"])]
    ends = [*(mark.start() for mark in marks[1:]), len(row.value["chat"])]
    turns = [
        _turn(row, number, _ROLES[mark[1]], row.value["chat"][mark.end() : end].replace(_END, "").strip())
        for number, (mark, end) in enumerate(zip(marks, ends, strict=True), 1)
    ]
    others = {name: value for name, value in row.value.items() if name not in ("chat", "system")}
    system = row.value.get("system")
    if not isinstance(system, str):
        return {**others, "messages": turns, **({} if system is None else {"system": system})}
    text, brace, functions = _SYSTEM.sub("", system, count=1).partition("\n{")
    found = [*_functions(row, brace + functions)]
    text = text.strip().removesuffix("-").strip()
    return {**others, "messages": turns, "system": text, **({"tools": found} if found else {})}


def _turn(row: SourceRow, number: int, role: str, text: str) -> Message:
    if role != "assistant" or _CALL not in text:
        return {"role": role, "content": text}
    content, _, written = text.partition(_CALL)
    try:
        call = json.loads(_QUOTED.sub(lambda found: json.dumps(found[1]), written.strip()))
    except (ValueError, RecursionError):
        raise bad_row(row.where, f"has a call in turn {number} that is not valid JSON: {written.strip()}") from None
    return {"role": role, "content": content.strip(), "tool_calls": [call]}


def _functions(row: SourceRow, text: str) -> Iterator[Any]:
    """Yields the JSON objects of a text, which follow one another."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            raise bad_row(row.where, f"has functions in its system message that are not valid JSON: {text}") from None
        yield value
        text = text[end:].lstrip(", \n\r\t")

"""The columns beside the turns of a chat: system message, tools, history, and the context of an instruction."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sansgpu.config.wording import counted, shown
from sansgpu.data.forms.cells import parsed_cell
from sansgpu.data.forms.form import USUAL, is_empty, is_missing
from sansgpu.data.forms.turns import Message, kind_of, read_turns, role_of, without_nulls
from sansgpu.data.rows import Column, Row, SourceRow, bad_row, is_text, row_value
from sansgpu.data.tables import Columns

SYSTEM_COLUMNS = "system", "system_prompt", "system_message"  # to try if data.system_column is not set
TOOLS_COLUMNS = "tools", "functions"  # to try if data.tools_column is not set
MEDIA_COLUMNS = "images", "videos", "audios", "image", "image_url", "img", "video", "audio"
LISTS_OF_TURNS = "messages", "conversations"  # columns that have nothing else
CONTEXT_COLUMNS = "input", "context"  # further text of an instruction
Tools = tuple[Mapping[str, Any], ...]  # JSON schemas of functions


def string_in(row: SourceRow, column: str) -> str:
    value = row.value[column]
    if not isinstance(value, str):
        raise bad_row(row.where, f"has {kind_of(value)} instead of a string in {column}")
    return value


def nonempty_in(row: SourceRow, column: str) -> str:
    text = string_in(row, column)
    require_nonempty(row.where, text, column)
    return text


def require_nonempty(where: str, text: Any, column: str) -> None:
    """Raises BadRowError if `text` is a string without content, or an empty list."""
    if not (text.strip() if isinstance(text, str) else text != []):
        raise bad_row(where, f"has an empty {column}")


def require_unicode(row: SourceRow, content: Any) -> None:
    if not is_text(json.dumps(content, ensure_ascii=False, default=str)):
        raise bad_row(row.where, "contains an unpaired surrogate, which is not valid text")


def row_of_turns(values: list[Any]) -> Row | None:
    """Returns the columns of a row that is a list of turns."""
    return {"messages": values} if values and role_of(values[0]) is not None else None


def only_text(row: SourceRow, value: Any, column: str, noun: str) -> Any:
    """Returns the text in a list of one; other values unchanged. Raises BadRowError if a list has several texts."""
    if not isinstance(value, list) or not value or not all(isinstance(parsed_cell(text), str) for text in value):
        return value
    if len(value) > 1:
        raise row.error(f"{column} holds {counted(len(value), noun)}; write one row for each")
    return value[0]


def has_values(keys: Sequence[str]) -> Callable[[Row, Columns], bool]:
    """Returns a function that recognizes rows with values for all keys. Empty turns beside other values are none."""

    turns = [key for key in keys if key in LISTS_OF_TURNS]

    def recognizes(row: Row, columns: Columns) -> bool:
        for key in keys:
            if is_missing(row.get(key)):
                return False
        has_empty_turns = any(is_empty(row[key]) for key in turns)
        return not has_empty_turns or all(map(is_empty, row.values()))

    return recognizes


def first_column(row: Row, names: Sequence[Column]) -> Column | None:
    if row.keys().isdisjoint(names):
        return None
    return next((name for name in names if not is_empty(row.get(name))), None)


def chat_columns(row: Row, columns: Columns) -> tuple[Column | None, Column | None]:
    """Returns the columns with the system message and with the tools, if the row has any."""
    system = first_column(row, SYSTEM_COLUMNS) if columns.system is None else columns.system
    return system, first_column(row, TOOLS_COLUMNS) if columns.tools is None else columns.tools


def _column_value(row: SourceRow, column: Column | None, key: str) -> Any:
    return None if column is None else row_value(row.value, column, key, row.where)


def system_message(row: SourceRow, columns: Columns) -> Any:
    """Returns the system message of a row, or None. Raises BadRowError if a configured column is missing."""
    found = _column_value(row, chat_columns(row.value, columns)[0], "data.system_column")
    return None if is_missing(found) or not found else found


def read_tools(row: SourceRow, columns: Columns) -> Tools:
    """Returns the tools in a column of a row: JSON schemas of functions, each as an object with `type` and `function`.

    The column may contain JSON text, or functions without that object. Raises BadRowError if it is invalid.
    """
    value = parsed_cell(_column_value(row, chat_columns(row.value, columns)[1], "data.tools_column"))
    if is_empty(value) or (isinstance(value, str) and not value.strip()):
        return ()
    return tuple(_tool(row, parsed_cell(tool)) for tool in (value if isinstance(value, (list, tuple)) else [value]))


def _tool(row: SourceRow, tool: Any) -> Mapping[str, Any]:
    match without_nulls(tool):
        case {"function": {"name": str()}} as whole:
            return {**whole}
        case {"name": str(), **rest} as function:
            parameters = rest.get("parameters")
            if isinstance(parameters, dict) and not _is_schema(parameters):  # as in xLAM's rows
                function = {**function, "parameters": {"type": "object", "properties": parameters}}
            return {"type": "function", "function": {key: part for key, part in function.items() if key != "type"}}
    raise bad_row(
        row.where,
        f"has {shown(tool)} in its tools instead of a JSON schema of a function with a name; "
        "rename the column if it has something else",
    )


def _is_schema(parameters: Mapping[str, Any]) -> bool:
    known = isinstance(parameters.get("type"), str) or isinstance(parameters.get("properties"), dict)
    return known or not parameters or not all(isinstance(one, dict) for one in parameters.values())


def all_turns(row: SourceRow, values: Any, column: str, columns: Columns = USUAL) -> list[Message]:
    """Returns the turns in a column after the message in the column of the system, unless they begin with it."""
    if media := first_column(row.value, MEDIA_COLUMNS):
        raise bad_row(row.where, f"has {media}, but only text is read")
    system = system_message(row, columns)
    first = [*read_turns(row.where, [{"role": "system", "content": system}], "system")] if system else []
    turns = [*read_turns(row.where, values, column, len(first))]
    return turns if turns[:1] == first else first + turns


def history_turns(row: SourceRow) -> list[Message]:
    """Returns the turns in the column `history`, usually pairs of a question and its answer."""
    history = row.value.get("history")
    return [] if is_empty(history) else [*read_turns(row.where, history, "history")]


def context_of(row: SourceRow) -> str:
    """Returns the text that belongs to an instruction, or "" if there is none."""
    column = first_column(row.value, CONTEXT_COLUMNS)
    return "" if column is None else string_in(row, str(column))


def after_system(row: SourceRow, prompt: str, columns: Columns) -> str:
    """Returns a prompt after the message in the column of the system, for models without a chat template."""
    system = system_message(row, columns)
    return f"{system}\n\n{prompt}" if system else prompt


# Glaive's conversations: one text with `USER:` and `ASSISTANT:` before turns

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


def answer_in(row: SourceRow, column: str) -> Any:
    """Returns an answer; a number as text."""
    value = row.value[column]
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


# ChatGPT's exports: the messages of a chat with all their variants, as a tree in `mapping`

_LEARNED, _MEDIA = "text", "multimodal_text"  # types of contents
CHATGPT: dict[str, Any] = {
    "mapping": {
        "1": {
            "message": {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["What is 2 + 2?"]}}
        },
        "2": {
            "message": {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": ["4"]}},
            "parent": "1",
        },
    },
    "current_node": "2",
}  # an example


def is_chatgpt(row: Row, columns: Columns) -> bool:
    mapping = row.get("mapping")
    return isinstance(mapping, dict) and any(isinstance(node, dict) and "message" in node for node in mapping.values())


def current_branch(row: SourceRow) -> Row:
    """Returns the row with the messages from the root of the tree to its current node as `messages`.

    They are the texts that were shown, without calls of tools and thoughts. Adjacent ones of a role are one message.
    Raises BadRowError if one has an image or sound.
    """
    mapping, node = row.value["mapping"], row.value.get("current_node")
    node = node if isinstance(node, str) and node in mapping else next(reversed(mapping))
    branch: dict[str, Any] = {}
    while isinstance(node, str) and node not in branch and isinstance(mapping.get(node), dict):
        branch[node] = mapping[node].get("message")
        node = mapping[node].get("parent")
    turns: list[Message] = []
    for message in filter(_is_shown, reversed(branch.values())):
        if message["content"].get("content_type") == _MEDIA:
            raise bad_row(row.where, "has a message with an image or sound, but only text is read")
        parts = message["content"].get("parts")
        text = "".join(filter(lambda part: isinstance(part, str), parts if isinstance(parts, list) else ()))
        role = message["author"]["role"]
        if text.strip() and turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{text}"
        elif text.strip():
            turns.append({"role": role, "content": text})
    others = {name: value for name, value in row.value.items() if name not in ("mapping", "current_node")}
    return {**others, "messages": turns}


def _is_shown(message: Any) -> bool:
    """Returns whether a message is one of the user to the model, or of the model to the user."""
    match message:
        case {"metadata": {"is_visually_hidden_from_conversation": True}}:
            return False
        case {"author": {"role": "user" | "assistant"}, "content": {"content_type": kind}}:
            return kind in (_LEARNED, _MEDIA) and message.get("recipient", "all") == "all"
    return False

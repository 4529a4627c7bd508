"""Turns of conversations, in the ways in which datasets write them: roles, contents, calls of tools, and flags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from sansgpu.config.wording import shown
from sansgpu.data.forms.cells import parsed_cell
from sansgpu.data.rows import bad_row, column_names

Message = dict[str, Any]  # role, content, and any other keys for the chat template

Role = Literal["system", "developer", "user", "assistant", "tool"]
ANSWERED_ROLES = "user", "tool"  # roles of a turn that the model can answer
SYSTEM_ROLES = "system", "developer"
# For each role, the roles of the turn that usually precedes it; None: it may be the first turn.
FOLLOWS: dict[Role, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
CALL_ROLES = "function_call", "tool_call"  # roles whose content is a call, as in LLaMA-Factory's rows
# Names of roles in lower case -> transformers' names.
ROLES: dict[str, Role] = {
    **{role: role for role in FOLLOWS},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai", "chatbot", "chatgpt", *CALL_ROLES), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "function_response", "ipython"), "tool"),
}
# Names of keys whose values are turns, as in {"input": "a?", "output": "b"}.
TURN_KEYS: dict[str, Role] = {
    "system": "system",
    **dict.fromkeys(("user", "human", "input", "instruction", "prompt", "question", "query"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "output", "response", "completion", "answer"), "assistant"),
}
ROLE_KEYS = "role", "from", "speaker", "author", "sender"
CONTENT_KEYS = "content", "value", "text", "message", "parts"
_USUAL_KEYS = frozenset((*ROLE_KEYS, *CONTENT_KEYS, *TURN_KEYS))
TEXT_PARTS = None, "text", "input_text", "output_text"  # types of parts of a content that are texts
MEDIA_KEYS = "image", "images", "image_url", "img", "video", "videos", "audio", "audios"
MEDIA_MARK = re.compile(r"\A\s*<(image|video|audio)>|<(image|video|audio)>\s*\Z")
# Flags of an answer -> the value with which it is learned. After reading, an answer that is not has the weight 0.
FLAGS = {"weight": True, "train": True, "trainable": True, "loss": True, "mask": False}
FLAG_VALUES = {True: True, False: False, "1": True, "0": False, "true": True, "false": False}  # also for 1.0 and 0.0
# The mark of a turn's end may be missing at the end of the text and before the next turn.
CHATML_TURN = re.compile(
    r"\s*<\|im_start\|>[ \t]*(\w+)[ \t]*\r?\n(.*?)"
    r"(<\|im_end\|>|(?=<\|im_start\|>[ \t]*\w+[ \t]*\r?\n|(?:</s>|<\|endoftext\|>)?\Z))",
    re.DOTALL,
)
CHATML_EDGE = r"\s*(<s>|</s>|<\|endoftext\|>)?\s*"  # what may stand before and after the turns


def kind_of(value: Any) -> str:
    """Names the kind of a value for messages about rows."""
    kinds: tuple[tuple[Any, str], ...] = ((type(None), "null"), (str, "a text"), (dict, "an object"), (list, "a list"))
    return next((name for kind, name in kinds if isinstance(value, kind)), f"a value of type {type(value).__name__}")


def without_nulls(value: Any) -> Any:
    """Removes keys without a value at any depth: in Parquet files an object has all keys that other rows have."""
    if isinstance(value, dict):
        found = {key: part for key, part in value.items() if part is not None}
        return {key: part if isinstance(part, str) else without_nulls(part) for key, part in found.items()}
    if isinstance(value, (list, tuple)):
        return [without_nulls(part) for part in value]
    return value


def chatml_turns(text: str) -> list[Message]:
    """Returns the turns of a text that consists of ChatML turns with known roles; of other texts, an empty list."""
    text = text.rstrip()
    turns, end = list[Message](), 0
    if begin := re.match(CHATML_EDGE, text):
        end = begin.end()
    while found := CHATML_TURN.match(text, end):
        turns.append({"role": found[1], "content": found[2] if found[3] else found[2].rstrip()})
        end = found.end()
    is_whole = re.fullmatch(CHATML_EDGE + r"(<\|im_start\|>assistant)?", text[end:]) is not None
    return turns if is_whole and all(turn["role"] in ROLES for turn in turns) else []


def role_of(turn: Any) -> Any:
    """Returns the role in a turn, under its usual name if it is known."""
    if not isinstance(turn, dict):
        return None
    for key in ROLE_KEYS:
        if (role := turn.get(key)) is not None:
            return ROLES.get(role.strip().lower(), role) if isinstance(role, str) else role
    return None


def turns_in_text(value: Any) -> Any:
    """Returns turns that are given as text, as in the cells of CSV files; returns other values unchanged."""
    found = parsed_cell(value)
    first = found[0] if isinstance(found, list) and found else found
    is_turn = isinstance(first, dict) and role_of(first) in tuple(FOLLOWS) and any(key in first for key in CONTENT_KEYS)
    return found if is_turn else value


def as_turns(value: Any, role: str) -> Any:
    """Returns a text or a single turn as a list of turns; other values unchanged."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [value] if isinstance(value, dict) else value


def looks_like_turns(value: Any) -> bool:
    """Returns whether the value of a column is a list of turns, or such a list as JSON text."""
    value = parsed_cell(value)
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(v, type(value[0])) for v in value)


def read_turns(where: str, values: Any, column: str, before: int = 0) -> Iterator[Message]:
    """Yields the turns in a row's column. `before` is the number of turns before them, for turn numbers in errors.

    Raises BadRowError if one is invalid. Answers that are not learned have the key `weight` with the value 0.
    """
    values = parsed_cell(values)
    if isinstance(values, dict) and any(isinstance(values.get(key), list) for key in ROLE_KEYS):
        values = _from_lists(without_nulls(values))
    if isinstance(values, str):
        values = chatml_turns(values) or values
    if not isinstance(values, (list, tuple)):
        raise bad_row(
            where,
            f"has {kind_of(values)} in {column} instead of a list of objects with role and content",
        )
    for number, value in enumerate(_single_turns(values), before + 1):
        yield _turn(where, number, value)


def _from_lists(values: Mapping[str, Any]) -> Any:
    """Returns the turns of an object with a list for each key, as older versions of `datasets` store them."""
    lengths = {len(part) if isinstance(part, list) else None for part in values.values()}
    if len(lengths) > 1 or None in lengths:
        return values
    return [dict(zip(values, turn, strict=True)) for turn in zip(*values.values(), strict=True)]


def _single_turns(values: Sequence[Any]) -> Iterator[Any]:
    """Yields objects with a role each, from texts that alternate, pairs of texts, or objects with a key for each role.

    Yields other values unchanged.
    """
    parts = [_with_usual_keys(without_nulls(parsed_cell(value))) for value in values]
    if all(isinstance(part, dict) for part in parts):
        for turn in parts:
            yield from _keyed_turns(turn) if role_of(turn) is None else (turn,)
        return
    if len(values) > 1 and all(isinstance(value, str) for value in values):
        values = [[("user", "assistant")[number % 2], value] for number, value in enumerate(values)]
    has_roles = any(isinstance(value, (list, tuple)) and len(value) == 2 and _is_role(value[0]) for value in values)
    for value in values:
        match value:
            case [str(role), content] if has_roles:
                yield {"role": role, "content": content}
            case [str(question)] | [str(question), None] if not has_roles:
                yield {"role": "user", "content": question}
            case [str(question), str(answer)] if not has_roles:
                yield from ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
            case dict() as turn if role_of(turn) is None:
                yield from _keyed_turns(turn)
            case other:
                yield other


def _with_usual_keys(turn: Any) -> Any:
    """Returns a turn without a role whose keys may have capitals, such as `Role`, with the usual keys."""
    if not isinstance(turn, dict) or role_of(turn) is not None:
        return turn
    folded = {key: str(key).strip().casefold() for key in turn}
    renamed = {key: name for key, name in folded.items() if name in _USUAL_KEYS and name not in turn}
    return {renamed.get(key, key): part for key, part in turn.items()}


def _is_role(name: Any) -> bool:
    return isinstance(name, str) and name.strip().lower() in ROLES


def _keyed_turns(value: Message) -> Iterator[Message]:
    """Yields the turns of an object whose keys name their roles: the question before the answer."""
    found = {key: TURN_KEYS[key] for key in value if key in TURN_KEYS and isinstance(value[key], str)}
    keys = sorted(found, key=lambda key: list(FOLLOWS).index(found[key]))
    others = {key: part for key, part in value.items() if key not in found}
    if len(set(found.values())) < len(keys) or not keys or "content" in value:  # two questions, for example
        yield value
        return
    yield from ({"role": found[key], "content": value[key]} for key in keys[:-1])
    yield {**others, "role": found[keys[-1]], "content": value[keys[-1]]}


def _turn(where: str, number: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise bad_row(
            where,
            f"has {kind_of(value)} as turn {number} instead of an object with role and content",
        )
    turn = without_nulls(value)
    named = "role" if "role" in turn else next((key for key in ROLE_KEYS if key in turn), "role")
    content_key = "content" if "content" in turn else next((key for key in CONTENT_KEYS if key in turn), "content")
    given, role, content = turn.get(named), role_of(turn), turn.get(content_key)
    if role is None:
        raise bad_row(where, f"has no role in turn {number}, only {column_names(turn) or 'an empty object'}")
    if not isinstance(role, str) or role not in FOLLOWS:
        raise bad_row(where, f"has the unknown role {role!r} in turn {number}; known roles are {', '.join(FOLLOWS)}")
    if not turn.keys().isdisjoint(MEDIA_KEYS) and (media := next((key for key in MEDIA_KEYS if turn.get(key)), None)):
        raise bad_row(where, f"has {media} in turn {number}, but only text is read")
    renamed = {named, content_key} - {"role", "content"}
    others = {key: part for key, part in turn.items() if key not in renamed}
    if role == "assistant":
        is_call = str(given).strip().lower() in CALL_ROLES
        others = with_calls(where, number, {**others, "function_call": content} if is_call else others)
        content = None if is_call else content
    others = with_weight(where, number, others, role == "assistant")
    calls = role == "assistant" and bool(others.get("tool_calls"))
    content = "" if content is None and calls else _text(where, number, role, content)
    if role == "assistant" and not calls and not content.strip():
        raise bad_row(where, f"has an empty answer in turn {number}")
    return {**others, "role": role, "content": content}


def _text(where: str, number: int, role: str, content: Any) -> str:
    """Returns the text of a content, which may have several parts. The result of a tool becomes JSON text."""
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    elif role == "tool" and content is not None and not isinstance(content, str):
        return json.dumps(content, ensure_ascii=False, default=str)
    elif isinstance(content, list) and any(isinstance(part, dict) and part.get("type") for part in content):
        kinds = dict.fromkeys(str(part["type"]) for part in content if isinstance(part, dict) and part.get("type"))
        other = next((kind for kind in kinds if kind not in TEXT_PARTS), "text")
        raise bad_row(where, f"has a part of type {other} in turn {number} that is not a text; only text is read")
    if not isinstance(content, str):
        raise bad_row(where, f"has {kind_of(content)} instead of a string as the content of turn {number}")
    if role == "user" and (mark := MEDIA_MARK.search(content)):
        raise bad_row(where, f"has the mark {mark[0].strip()} in turn {number}, but only text is read")
    return content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
    )


def unused_of_parts(turns: Any) -> Iterator[str]:
    """Names the keys beside the text in parts of contents, such as `cache_control`."""
    listed = parsed_cell(turns)
    for turn in listed if isinstance(listed, (list, tuple)) else [listed]:
        values = map(turn.get, CONTENT_KEYS) if isinstance(turn, dict) else ()
        for parts in [value for value in values if isinstance(value, list)]:
            found = (part for part in parts if isinstance(part, dict) and role_of(turn) != "tool")
            keys = dict.fromkeys(name for part in found for name, value in part.items() if value is not None)
            yield from (f"{name} of a part" for name in keys if name not in ("type", "text"))


def with_calls(where: str, number: int, turn: Message) -> Message:
    """Returns an answer with its calls of tools as transformers' `tool_calls`, whose arguments are objects.

    The calls may be JSON text, lack the key `function`, or be a single `function_call`.
    """
    if turn.keys().isdisjoint(("tool_calls", "function_call")):
        return turn
    calls = parsed_cell(turn.get("tool_calls"))
    if not calls and turn.get("function_call"):
        calls = parsed_cell(turn["function_call"])
        turn = {key: part for key, part in turn.items() if key != "function_call"}
    if not calls:
        is_text = isinstance(turn.get("tool_calls"), str)  # such as "[]"
        return {key: part for key, part in turn.items() if key != "tool_calls"} if is_text else turn
    listed = calls if isinstance(calls, list) else [calls]
    return {**turn, "tool_calls": [_call(where, number, without_nulls(parsed_cell(call))) for call in listed]}


def _call(where: str, number: int, call: Any) -> Message:
    if not isinstance(call, dict) or not isinstance(call.get("function", call.get("name")), (dict, str)):
        raise bad_row(where, f"has the tool call {shown(call)} in turn {number} instead of a name and arguments")
    function, others = call.get("function"), {key: part for key, part in call.items() if key != "function"}
    if not isinstance(function, dict):  # the name and the arguments are not in an object of their own
        own = {key: others.pop(key) for key in ("name", "arguments", "parameters") if key in others}
        function, others = {"name": function, **own}, {**others, "type": "function"}
    if not isinstance(function.get("name"), str):
        raise bad_row(where, f"has a tool call without a name in turn {number}")
    arguments = without_nulls(parsed_cell(function.get("arguments", function.get("parameters", {}))))
    if isinstance(arguments, str) and (not arguments.strip() or arguments.lstrip().startswith(("{", "["))):
        if arguments.strip():
            raise bad_row(where, f"has arguments of a tool in turn {number} that are not valid JSON: {arguments}")
        arguments = {}
    rest = {key: part for key, part in function.items() if key != "parameters" or "arguments" in function}
    return {**others, "function": {**rest, "arguments": arguments}}


def with_weight(where: str, number: int, turn: Message, is_answer: bool = True) -> Message:
    """Returns a turn without the flags that say whether it is learned. An answer that is not has the weight 0 instead.

    Other turns are never learned, so they keep flags that say otherwise.
    """
    if turn.keys().isdisjoint(FLAGS):
        return turn
    learned, others = True, dict(turn)
    for name, learned_value in FLAGS.items():
        if name in others:
            value = others.pop(name)
            value = value.strip().lower() if isinstance(value, str) else value
            flag = FLAG_VALUES.get(value) if isinstance(value, (str, bool, int, float)) else None
            if flag is None:
                raise bad_row(where, f"has the {name} {shown(value)} in turn {number} instead of 0 or 1")
            learned &= flag is learned_value
            if flag is learned_value and not is_answer:
                others[name] = turn[name]
    return others if learned or not is_answer else {**others, "weight": 0}


def order_problem(turns: Sequence[Message]) -> str | None:
    """Describes the first turn that does not follow its usual predecessor, which many chat templates refuse."""
    before: str | None = None
    for number, turn in enumerate(turns, 1):
        role = turn["role"]
        if before not in FOLLOWS[role]:
            return f"turn {number} ({role}) {f'follows {before}' if before else 'is the first'}"
        before = role
    return None


def merged_turns(turns: Sequence[Message], boundary: int = 0) -> list[tuple[Message, list[int]]]:
    """Merges each turn that has the role of the turn before it into that one.

    A system message after the first question, and an answer before it, become parts of the next question. No turn is
    merged across `boundary`. Returns the new turns, and the indices of the turns that each consists of.
    """
    merged = list[tuple[Message, list[int]]]()
    first = len([*takewhile(lambda turn: turn["role"] in SYSTEM_ROLES, turns)])
    asked = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
    for number, turn in enumerate(turns):
        is_greeting = turn["role"] == "assistant" and number < asked < len(turns)
        if is_greeting or (turn["role"] in SYSTEM_ROLES and number >= first):
            turn = {**turn, "role": "user"}
        if merged and number != boundary and turn["role"] != "tool" and turn["role"] == merged[-1][0]["role"]:
            last, indices = merged[-1]
            merged[-1] = _joined(last, turn), [*indices, number]
        else:
            merged.append((turn, [number]))
    return merged


def _joined(one: Message, other: Message) -> Message:
    calls = [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    content = "\n\n".join(filter(None, (one["content"], other["content"])))
    return {**one, **other, "content": content, **({"tool_calls": calls} if calls else {})}

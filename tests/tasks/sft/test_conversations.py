"""Rows are parsed into conversations; errors name the invalid row."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from sansgpu.data.forms.chats import CONVERSATIONS, Conversation
from sansgpu.data.rows import BadRowError, SourceRow

WHERE = "notes.jsonl, line 7"


def conversation_of(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def read(**row: Any) -> Conversation:
    return CONVERSATIONS.read(SourceRow(WHERE, row))


def test_each_form_is_read_and_other_columns_are_ignored() -> None:
    turns = tuple(conversation_of("a?", "b"))
    assert read(messages=list(turns), id=7, text="c", prompt=None) == Conversation(WHERE, turns)
    assert read(prompt="a?", completion="b", text="c") == Conversation(WHERE, turns, 1, ("a?", "b"))
    assert read(prompt=[turns[0]], completion=[turns[1]]) == Conversation(WHERE, turns, 1)
    assert read(prompt=[turns[0]], completion="b") == Conversation(WHERE, turns, 1)
    assert read(text=" c ", messages=None) == Conversation(WHERE, text=" c ")
    alpaca = read(instruction="a?", output="b", text="c")
    assert (alpaca.turns, alpaca.first) == (turns, 1)
    assert read(instruction="a?", input=None, output="b") == read(instruction="a?", input=" ", output="b") == alpaca
    assert read(instruction="a", input="?", output="b").turns[0]["content"] == "a\n\n?"


def test_other_fields_of_a_turn_are_kept_for_the_template() -> None:
    calls = [{"function": {"name": "look", "arguments": {}}}]
    asking = {"role": "assistant", "content": None, "tool_calls": calls, "name": None}
    told = {"role": "tool", "content": "x", "tool_call_id": "1", "name": "look"}
    question, answer = conversation_of("a?", "b")
    kept = {"role": "assistant", "content": "", "tool_calls": calls}
    assert read(messages=[question, asking, told, told, answer]).turns == (question, kept, told, told, answer)


def bad_rows() -> Iterator[tuple[str, Any]]:
    def turns(*roles: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": "x"} for role in roles]}

    yield "is of type list instead of an object", [1]
    yield (
        "has id, input, but needs messages, prompt and completion",
        {"id": 1, "input": "x"},
    )
    yield "has no columns, but needs", {"text": None}
    yield "has no assistant turn", turns("user")
    yield "has no assistant turn", {"prompt": conversation_of("a", "b"), "completion": conversation_of("c")}
    yield "has no assistant turn", {"messages": []}
    yield "empty answer in turn 2", {"messages": conversation_of("a", " \n")}
    yield "empty answer in turn 2", {"prompt": "a", "completion": [{"role": "assistant", "content": ""}]}
    yield "empty completion", {"prompt": "a", "completion": "\t"}
    yield "empty output", {"instruction": "a", "output": ""}
    yield "empty text", {"text": " "}
    yield "unknown role 'narrator' in turn 2", turns("user", "narrator")
    yield "has no role in turn 1, only content", {"messages": [{"content": "x"}]}
    yield (
        "has null instead of a string as the content of turn 1",
        {"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]},
    )
    yield (
        "part of type image in turn 1 that is not a text",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    )
    yield "has a text as turn 1", {"messages": ["x"]}
    yield "has a text in messages", {"messages": "x"}
    yield "has a value of type int in prompt instead of a list", {"prompt": 1, "completion": "x"}
    yield "has an object instead of a string in text", {"text": {}}
    yield "has a list instead of a string in input", {"instruction": "a", "input": ["b"], "output": "c"}
    yield "contains an unpaired surrogate", {"text": "a\ud800"}
    yield "contains an unpaired surrogate", {"messages": conversation_of("\udc00", "b")}
    yield "contains an unpaired surrogate", {"prompt": "a", "completion": "\ud800"}


@pytest.mark.parametrize(("problem", "value"), list(bad_rows()))
def test_a_bad_row_is_named(problem: str, value: Any) -> None:
    with pytest.raises(BadRowError, match=rf"^{WHERE}:? .*{problem}.*; fix or remove the row\.$"):
        CONVERSATIONS.read(SourceRow(WHERE, value))


def test_the_readers_error_is_passed_on() -> None:
    problem = f"{WHERE} is not valid JSON: Extra data at character 3; fix or remove the row."
    with pytest.raises(BadRowError, match=f"^{re.escape(problem)}$"):
        CONVERSATIONS.read(SourceRow(WHERE, None, problem))


def test_texts_in_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]
    in_parts = [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    read = CONVERSATIONS.read(SourceRow(WHERE, {"messages": in_parts}))
    assert read == CONVERSATIONS.read(SourceRow(WHERE, {"messages": conversation_of("a?", "b")}))

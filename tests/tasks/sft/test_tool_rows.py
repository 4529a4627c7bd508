"""Calls of tools are learned in the form of each chat template, however a row writes their arguments."""

import json
from typing import Any

import pytest

from sansgpu.data.forms.chats import CONVERSATIONS
from sansgpu.data.rows import SourceRow
from sansgpu.models.generation.call_reader import ToolCallReader
from sansgpu.models.generation.calls import ToolCall
from sansgpu.models.generation.tool_calls import tool_use
from sansgpu.tasks.sft.chat import mask_conversation, show_masked
from tests.tasks.sft.test_chat import tokenizer_of
from tests.tool_templates import FAMILIES

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": PARAMETERS}}
ARGUMENTS = {"text": 'the "blue"\n{mug} é', "count": 5, "place": {"shelves": ["a", 2]}}
END = "<|im_end|>"


def learned(tokenizer: Any, arguments: Any) -> list[str]:
    """Returns the texts of a row that are learned, which has a call with such arguments."""
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "Mugs?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "14", "tool_call_id": "a1b2c3d4e"},
        {"role": "assistant", "content": "There are 14."},
    ]
    row = SourceRow("a.jsonl, line 1", {"messages": turns, "tools": [TOOL]})
    masked = mask_conversation(CONVERSATIONS.read(row), tokenizer)
    assert masked.omitted in ((), ("tool_call_id of a turn",), ("tool_calls of a turn",))
    shown = show_masked(masked.ids, masked.learned, tokenizer)
    return [part.partition("⟧")[0] for part in shown.split("⟦")[1:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_learned_once_encoded(family: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[family], eos_token=END)
    first, second = texts = learned(tokenizer, ARGUMENTS)
    assert second == f"There are 14.{END}"
    assert first.endswith(END)
    form = tool_use(tokenizer).form
    assert form is not None
    reader = ToolCallReader(form, {"look": PARAMETERS})
    assert [*reader.add(first.removesuffix(END)), *reader.end()] == [ToolCall("look", ARGUMENTS)]
    assert learned(tokenizer, json.dumps(ARGUMENTS)) == texts


def test_ids_of_results_follow_those_of_their_calls() -> None:
    template = FAMILIES["kimi k2"].replace("(m.content or '')", "(m.tool_call_id or '') + (m.content or '')")
    call = {"function": {"name": "look", "arguments": {}}}
    results = [{"role": "tool", "content": f"{n}", "tool_call_id": name} for n, name in enumerate("ba")]
    turns = [
        {"role": "user", "content": "Mugs?"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "a"}, {**call, "id": "b"}]},
        *results,
        {"role": "assistant", "content": "So."},
    ]
    row = SourceRow("a.jsonl, line 1", {"messages": turns, "tools": [TOOL]})
    tokenizer = tokenizer_of(template, eos_token=END)
    masked = mask_conversation(CONVERSATIONS.read(row), tokenizer)
    shown = show_masked(masked.ids, masked.learned, tokenizer)
    assert "begin|>functions.look:0<|" in shown
    assert "begin|>functions.look:1<|" in shown
    assert shown.index("functions.look:10<") < shown.index("functions.look:01<")

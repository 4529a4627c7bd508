"""The form of tool calls is found by rendering one, and calls are read from text that arrives in any pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tools.tiny_model import make_tokenizer

from sansgpu.models.generation.tool_calls import CallForm, ToolCall, ToolCallReader, tool_use
from tests.tool_templates import HERMES, LLAMA, MISTRAL, TURNS

TAGS = CallForm("<tool_call>", "</tool_call>", "name", "arguments", is_list=False)
BARE = CallForm("", "", "name", "parameters", is_list=False)
LISTED = CallForm("", "", "name", "arguments", is_list=True)
NAMES = ("get_stock", "close")
STOCK, CLOSE = ToolCall("get_stock", {"sku": "MUG-B"}), ToolCall("close", {})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(encoder=False)


@pytest.mark.parametrize(
    ("calls", "form"),
    [
        (HERMES, TAGS),
        (LLAMA, BARE),
        (MISTRAL, LISTED),  # the template's mark is a special token, which generated text lacks
        ("{{ '\\n<call>' }}{{ {'arguments': c.function.arguments, 'tool': c.function.name} | tojson }}",
         CallForm("<call>", "", "tool", "arguments", is_list=False)),
        ("{{ '<tools>' }}{{ [c.function] | tojson }}{{ '</tools>' }}",
         CallForm("<tools>", "</tools>", "name", "arguments", is_list=True)),
        ("{{ '<function=' + c.function.name + '>' }}{{ c.function.arguments | tojson }}", None),
        ("{{ '[' + c.function.name + '()]' }}", None),
    ],
)  # fmt: skip
def test_the_form_is_found_by_rendering_a_call(tokenizer: Any, calls: str, form: CallForm | None) -> None:
    tokenizer.chat_template = calls if "{% for" in calls else TURNS.replace("CALLS", calls)
    found = tool_use(tokenizer)
    assert (found.form, found.shows_tools, found.shows_calls) == (form, True, True)


def test_templates_without_tools_are_recognized(tokenizer: Any) -> None:
    for template, shows in (
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", (False, False)),
        ("{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ raise_exception('') }}{% endif %}{% endfor %}",
         (False, False)),
        ("{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}", (True, False)),
        (TURNS.replace("tools", "others").replace("CALLS", "{{ c.function.name }}"), (False, True)),
    ):  # fmt: skip
        tokenizer.chat_template = template
        found = tool_use(tokenizer)
        assert (found.shows_tools, found.shows_calls, found.form) == (*shows, None)


def read(form: CallForm, pieces: list[str], at_most: int | None = None) -> list[str | ToolCall]:
    """Returns the parts of an answer, with adjacent texts joined."""
    reader, parts = ToolCallReader(form, NAMES, at_most), list[str | ToolCall]()
    for part in [part for piece in pieces for part in reader.add(piece)] + [*reader.end()]:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    assert reader.has_calls == any(isinstance(part, ToolCall) for part in parts)
    return parts


S = '{"name": "get_stock", "arguments": {"sku": "MUG-B"}}'
C = '{"name": "close", "arguments": {}}'
ANSWERS: list[tuple[CallForm, str, list[str | ToolCall]]] = [
    (TAGS, "Nothing to call.\n", ["Nothing to call.\n"]),
    (TAGS, f"<tool_call>\n{S}\n</tool_call>", [STOCK]),
    (TAGS, f"I look. \n\n<tool_call>{S}</tool_call>\n<tool_call>\n{C}\n</tool_call>\n", ["I look.", STOCK, CLOSE]),
    (TAGS, f"<tool_call>{S}</tool_call>\n\nDone <b> soon", [STOCK, "Done <b> soon"]),
    (TAGS, f"<tool_call>\n{S}", [STOCK]),  # the model ended the answer instead of closing the call
    (TAGS, f"<tool_call>\n{S[:-3]}", [f"<tool_call>\n{S[:-3]}"]),  # cut off
    (TAGS, f"<tool_call>{{]</tool_call> <tool_call>{C}</tool_call>", ["<tool_call>{]</tool_call>", CLOSE]),
    (TAGS, '<tool_call>{"name": "close", "arguments": {"a": "</tool_call>\n"}}</tool_call>',
     [ToolCall("close", {"a": "</tool_call>\n"})]),
    (TAGS, '<tool_call>{"name": "close", "arguments": {"a": NaN}}</tool_call>',
     ['<tool_call>{"name": "close", "arguments": {"a": NaN}}</tool_call>']),
    (TAGS, "<tool_call>" + "[" * 100_000 + "</tool_call>", ["<tool_call>" + "[" * 100_000 + "</tool_call>"]),
    (TAGS, "5 < 6 and <tool_", ["5 < 6 and <tool_"]),
    (BARE, '{"name": "get_stock", "parameters": {"sku": "MUG-B"}}', [STOCK]),
    (BARE, '\n{"name": "get_stock", "parameters": {"sku": "MUG-B"}}; {"name": "close", "parameters": {}} ',
     [STOCK, CLOSE]),
    (BARE, '{"name": "Ada", "parameters": {}}', ['{"name": "Ada", "parameters": {}}']),  # no function
    (BARE, '{"name": "close"}', ['{"name": "close"}']),
    (BARE, f"In JSON: {C}", [f"In JSON: {C}"]),
    (LISTED, f"[{S}, {C}]", [STOCK, CLOSE]),
    (LISTED, ' [{"name": "close", "arguments": {}, "id": "a1b2c3d4e"}]', [CLOSE]),
    (LISTED, "[1, 2]", ["[1, 2]"]),
    (LISTED, S, [S]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "parts"), ANSWERS)
def test_calls_are_read_however_the_text_is_divided(form: CallForm, text: str, parts: list[str | ToolCall]) -> None:
    assert read(form, [text]) == parts
    draw = random.Random(0)
    for _ in range(3 if len(text) < 1000 else 0):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 20)))
        assert read(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == parts
    assert read(form, [*text[:1000], text[1000:]]) == parts


def test_text_is_not_held_back_longer_than_needed() -> None:
    reader = ToolCallReader(TAGS, NAMES)
    assert [*reader.add("I look")] == ["I look"]
    assert [*reader.add(" now <tool")] == [" now"]
    assert [*reader.add("s> and")] == [" <tools> and"]
    assert [*reader.add(f" <tool_call>{S}</tool_call")] == []
    assert [*reader.add(">")] == [STOCK]


def test_the_number_of_calls_can_be_limited() -> None:
    text = f"<tool_call>{S}</tool_call><tool_call>{C}</tool_call>"
    assert read(TAGS, [text], at_most=1) == [STOCK]
    assert read(LISTED, [f"[{S}, {C}]"], at_most=1) == [STOCK]

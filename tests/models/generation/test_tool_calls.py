"""The form of tool calls is found by rendering some, and calls are read from text that arrives in any pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools.tiny_model import make_tokenizer

from sansgpu.models.generation.call_form import CallForm
from sansgpu.models.generation.call_reader import ToolCallReader
from sansgpu.models.generation.call_syntax import JsonCall
from sansgpu.models.generation.calls import ToolCall
from sansgpu.models.generation.prompts import TokenDecoder, prompt_text
from sansgpu.models.generation.tool_calls import ToolUse, tool_use
from tests.tool_templates import FAMILIES, MARKS, TURNS

TAGS = CallForm(JsonCall("name", "arguments"), ("<tool_call>",), "", "</tool_call>")
BARE = CallForm(JsonCall("name", "parameters"), ("",), "", "")
LISTED = CallForm(JsonCall("name", "arguments"), ("[",), ", ", "]")
TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "is_new": {"type": ["boolean", "null"]},
    "place": {"type": "object"},
    "tags": {"type": "array"},
}
SCHEMAS: dict[str, Any] = {"get_stock": {"type": "object", "properties": TYPES}, "close": {}}
STOCK, CLOSE = ToolCall("get_stock", {"sku": "MUG-B"}), ToolCall("close", {})
QUESTION = {"role": "user", "content": "Blue mugs?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer(encoder=False)
    made.add_special_tokens({"additional_special_tokens": MARKS})
    return made


@pytest.fixture(scope="module")
def uses(tokenizer: Any) -> dict[str, ToolUse]:
    found = {}
    for family, template in FAMILIES.items():
        tokenizer.chat_template = template
        found[family] = tool_use(tokenizer)
    return found


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "\n",
        "a\n",
        "\nb\n",
        '"',
        "'",
        "\\",
        "\\n",
        "it's",
        '{"a": 1}',
        "5",
        "true",
        "null",
        "[1, 2]",
        "é🙂",
        "a, b=(c)",
        "</b>",
    ]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(["a", "b_2", "c"]), parts, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "is_new": st.none() | st.booleans(),
        "place": st.dictionaries(st.sampled_from(["a", "b_2", "c"]), JSON_VALUES, max_size=3),
        "tags": st.lists(JSON_VALUES, max_size=3),
    },
)
CALLS = st.lists(
    st.builds(ToolCall, st.just("get_stock"), ARGUMENTS) | st.just(ToolCall("close", {})), min_size=1, max_size=3
)


def written(tokenizer: Any, calls: list[ToolCall], content: str = "") -> str:
    """Returns the text of an answer with calls, as the tokenizer's chat template writes it."""
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    listed = [{"id": "a1b2c3d4e", "type": "function", "function": function} for function in functions]
    answer = {"role": "assistant", "content": content, "tool_calls": listed}
    whole = prompt_text(tokenizer, [QUESTION, answer])
    start, end = prompt_text(tokenizer, [QUESTION]), "<|im_end|>\n<|im_start|>assistant\n"
    assert whole.startswith(start)
    assert whole.endswith(end)
    return whole[len(start) : -len(end)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_calls_that_a_template_writes_are_read_back(
    family: str, calls: list[ToolCall], tokenizer: Any, uses: dict[str, ToolUse]
) -> None:
    form = uses[family].form
    assert form is not None
    tokenizer.chat_template = FAMILIES[family]
    text = written(tokenizer, calls)
    assert repr(read(form, [text])) == repr(calls)  # repr tells 1 from True and 1.0
    assert repr(read(form, [*text])) == repr(calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_before_calls_and_broken_calls_are_text(family: str, tokenizer: Any, uses: dict[str, ToolUse]) -> None:
    form = uses[family].form
    assert form is not None
    tokenizer.chat_template = FAMILIES[family]
    call = ToolCall("get_stock", {"place": {"a": ["x"]}, "text": "MUG-B"})
    text = written(tokenizer, [call, CLOSE], "I look.")
    if form.can_follow_text:
        assert read(form, [*text]) == ["I look.", call, CLOSE]
    for broken in (text[: text.index("MUG-B")], text.replace("get_stock", "%%%"), text.replace("I look", "[I] {look}")):
        parts = read(form, [*broken])
        assert parts == read(form, [broken])
        assert isinstance(parts[0], str)
        assert call not in parts or "{look}" in parts[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_calls_survive_decoding(family: str, tokenizer: Any, uses: dict[str, ToolUse]) -> None:
    form = uses[family].form
    assert form is not None
    assert not form.marks or form.marks <= {*MARKS, "[CLS]"}
    tokenizer.chat_template = FAMILIES[family]
    ids = tokenizer(written(tokenizer, [STOCK, CLOSE]) + "<|im_end|>", add_special_tokens=False).input_ids
    assert read(form, [TokenDecoder(tokenizer)(ids, form.marks)]) == [STOCK, CLOSE]


def test_values_without_a_schema_are_json_or_text(tokenizer: Any, uses: dict[str, ToolUse]) -> None:
    form = uses["glm-4.5"].form
    assert form is not None
    tokenizer.chat_template = FAMILIES["glm-4.5"]
    values = {"a": 5, "b": "5 mugs", "c": [1], "d": '"x"', "e": None}
    assert read(form, [written(tokenizer, [ToolCall("other", values)])]) == [ToolCall("other", values)]
    spelled = written(tokenizer, [ToolCall("get_stock", {"is_new": "True", "count": "many", "ratio": "2"})])
    assert read(form, [spelled]) == [ToolCall("get_stock", {"is_new": True, "count": "many", "ratio": 2})]


def test_gpt_oss_writes_calls_in_other_ways_than_its_template(uses: dict[str, ToolUse]) -> None:
    form = uses["gpt-oss"].form
    assert form is not None
    for text in (
        "<|channel|>commentary to=functions.close <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.close<|channel|>commentary json<|message|>{}",
        "<|start|>assistant<|channel|>commentary to=functions.close <|message|>{}",
        " to=functions.close<|channel|>commentary <|constrain|>json<|message|>{}",
    ):
        assert read(form, [*text]) == [CLOSE]
    thoughts = "<|channel|>analysis<|message|>They want it closed.<|end|>"
    call = "<|start|>assistant<|channel|>commentary to=functions.close <|constrain|>json<|message|>{}"
    assert read(form, [*(thoughts + call)]) == [thoughts, CLOSE]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("[get_stock(text='it\\'s', place={'a': [True, None]})]", {"text": "it's", "place": {"a": [True, None]}}),
        ("[get_stock(text='a\nb', tags=[true, null, 'x'])]", {"text": "a\nb", "tags": [True, None, "x"]}),
        ("[get_stock( text = 'a, (b' , count=-5)]", {"text": "a, (b", "count": -5}),
    ],
)
def test_python_calls_may_have_python_values(uses: dict[str, ToolUse], call: str, arguments: dict[str, Any]) -> None:
    form = uses["llama 4"].form
    assert form is not None
    assert read(form, [*call]) == [ToolCall("get_stock", arguments)]
    for wrong in (
        "[get_stock(5)]",
        "[get_stock(text=open)]",
        "[get_stock(text=b'x')]",
        "[print(text='x')]",
        "[get_stock(count=1e999)]",
    ):
        assert read(form, [*wrong]) == [wrong]


@pytest.mark.parametrize(
    ("calls", "written"),
    [
        ("{{ '\\n<call>' }}{{ {'arguments': c.function.arguments, 'tool': c.function.name} | tojson }}",
         '<call>{"arguments": {"a": 1}, "tool": "close"}'),
        ("{{ '<tools>' }}{{ [c] | tojson }}{{ '</tools>' }}",
         '<tools>[{"type": "function", "function": {"name": "close", "arguments": {"a": 1}}}]</tools>'),
        ("{{ '<function=' + c.function.name + '>' }}{{ c.function.arguments | tojson }}", '<function=close>{"a": 1}'),
        ("{{ '[' + c.function.name + '()]' }}", None),
        ("{{ c.function.name ~ c.function.arguments }}", 'close{"a": 1}'),  # which Python would write as {'a': 1}
    ],
)  # fmt: skip
def test_other_forms_are_found_by_rendering_calls(tokenizer: Any, calls: str, written: str | None) -> None:
    tokenizer.chat_template = TURNS.replace("CALLS", calls)
    found = tool_use(tokenizer)
    assert (found.shows_tools, found.shows_calls, found.form is None) == (True, True, written is None)
    if found.form is not None and written is not None:
        assert read(found.form, [written]) == [ToolCall("close", {"a": 1})]


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
    reader, parts = ToolCallReader(form, SCHEMAS, at_most), list[str | ToolCall]()
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
    reader = ToolCallReader(TAGS, SCHEMAS)
    assert [*reader.add("I look")] == ["I look"]
    assert [*reader.add(" now <tool")] == [" now"]
    assert [*reader.add("s> and")] == [" <tools> and"]
    assert [*reader.add(f" <tool_call>{S}</tool_call")] == []
    assert [*reader.add(">")] == [STOCK]


def test_the_number_of_calls_can_be_limited() -> None:
    text = f"<tool_call>{S}</tool_call><tool_call>{C}</tool_call>"
    assert read(TAGS, [text], at_most=1) == [STOCK]
    assert read(LISTED, [f"[{S}, {C}]"], at_most=1) == [STOCK]

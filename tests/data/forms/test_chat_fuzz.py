"""Damaged rows of chats are read or refused with their place, and no text of a row is lost without a word."""

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from sansgpu.data.forms.chats import Conversation, ConversationOptions, Prompt
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow

KINDS = "conversations", "prompts", "preferences"
NOT_TEXT = "role", "from", "type", "parameters"
NEW_KEYS = (
    "role", "content", "from", "value", "text", "name", "system", "system_prompt", "tools", "functions", "history",
    "tool_calls", "function_call", "weight", "mask", "input", "context", "output", "answer", "extra",
)  # fmt: skip
NEW_VALUES: tuple[Any, ...] = (
    None, "", 0, -1.5, True, [], {}, "x", ["x"], [None], [[]], "[", '{"a": 1}', "[1]", "[" * 3000, '"', "\udc00", b"x",
    {"role": ["user"], "content": ["x"]}, {"from": ["x"]}, {"role": {"a": 1}}, [["a", "b"]], [{"role": "user"}],
    {"function": {"name": "f"}}, [{"name": "f", "arguments": "{}"}], float("nan"),
)  # fmt: skip


def damaged(value: Any, draw: random.Random) -> Any:
    if draw.random() < 0.1:
        return draw.choice(NEW_VALUES)
    if isinstance(value, dict):
        found = {key: damaged(part, draw) for key, part in value.items() if draw.random() > 0.05}
        return {**found, draw.choice(NEW_KEYS): draw.choice(NEW_VALUES)} if draw.random() < 0.15 else found
    if isinstance(value, list):
        return [damaged(part, draw) for part in value if draw.random() > 0.05]
    return value[: len(value) // 2] if isinstance(value, str) and draw.random() < 0.1 else value


def marked(value: Any, draw: random.Random, key: str = "") -> Any:
    """Replaces texts by unique ones, and adds further texts."""
    if isinstance(value, dict):
        found = {name: marked(part, draw, name) for name, part in value.items() if draw.random() > 0.05}
        further = {draw.choice(NEW_KEYS[1:]): mark(draw)} if key not in NOT_TEXT and draw.random() < 0.2 else {}
        return {**found, **further}
    if isinstance(value, list):
        return [marked(part, draw, key) for part in value]
    return mark(draw) if isinstance(value, str) and key not in NOT_TEXT and not value.startswith("[") else value


def mark(draw: random.Random) -> str:
    return f"<{draw.randrange(10**9)}>"


def rows_of(kind: str, draw: random.Random) -> Iterator[Any]:
    examples = [form.example for form in FORMS[kind].forms]
    call = {"role": "assistant", "content": "b", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}], "weight": 0}
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, call, {"role": "tool", "content": {"b": 2}}]
    while True:
        yield draw.choice([*examples, {"messages": [*turns, *turns[:1]], "tools": '[{"name": "f"}]'}])


def read(kind: str, row: Any, report: RowReport) -> list[Conversation | Prompt]:
    found = FORMS[kind].read(SourceRow("a.jsonl, line 1", row), report=report)
    options = ConversationOptions(merge_turns=True)
    if isinstance(found, Prompt):
        return [options.applied_to_prompt(found)]
    conversations = [found] if isinstance(found, Conversation) else found.conversations
    return [options.applied(one) for one in conversations]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_rows_are_read_or_refused(kind: str) -> None:
    draw, refused = random.Random(1), list[str]()
    rows = rows_of(kind, draw)
    for _ in range(3000):
        try:
            read(kind, damaged(next(rows), draw), RowReport("fail"))
        except BadRowError as error:
            refused.append(str(error))
    assert all(message.startswith("a.jsonl, line 1") for message in refused)
    assert 300 < len(refused) < 2700


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_of_a_row_is_lost(kind: str) -> None:
    draw, count = random.Random(2), 0
    rows = rows_of(kind, draw)
    for _ in range(3000):
        row, report = marked(next(rows), draw), RowReport("fail")
        try:
            found = read(kind, row, report)
        except BadRowError:
            continue
        learned = "".join(f"{one.turns}{one.text}{one.tools}" for one in found)
        divided = isinstance(row.get("chosen"), str) and "prompt" not in row  # and in which answers are compared
        if divided or "completions" in row:
            continue
        if any("of a part" in name for name in report.unused):
            continue
        used = {name: value for name, value in row.items() if name not in (*report.unused, "answer")}
        assert {*re.findall(r"<\d+>", str(used))} <= {*re.findall(r"<\d+>", learned)}, row
        count += 1
    assert count > 300

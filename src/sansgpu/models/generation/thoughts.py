"""Finds the thoughts in the answers of a conversation, and those that a chat template leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

THOUGHT_KEYS = "reasoning_content", "reasoning", "thinking"  # keys of a turn
THOUGHT_START, THOUGHT_END = "<think>", "</think>"  # marks in its content; the first may be in the prompt


def lost_thoughts(
    messages: Sequence[dict[str, Any]], text: str, render: Callable[[Sequence[dict[str, Any]]], str]
) -> int:
    """Returns the number of messages whose thoughts are not in `text`, which is `render(messages)`.

    Renders the messages once more with marks in the thoughts, because their words may also occur elsewhere.
    """
    unused = (mark for code in range(0xE000, 0xF8FF) if (mark := chr(code)) not in text)  # private use area
    start, end = next(unused), next(unused)
    marks = [f"{start}{number}{end}" for number in range(len(messages))]
    marked = [_with_mark(message, mark) for message, mark in zip(messages, marks, strict=True)]
    thinking = [mark for mark, one, message in zip(marks, marked, messages, strict=True) if one != message]
    if not thinking:
        return 0
    rendered = render(marked)
    return sum(mark not in rendered for mark in thinking)


def _with_mark(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Returns a message with a mark at the end of its thoughts, if it is an answer with any."""
    if message["role"] != "assistant":
        return message
    named = {key: message[key].rstrip() + mark for key in THOUGHT_KEYS if _is_thought(message.get(key))}
    thoughts, found, answer = message["content"].rpartition(THOUGHT_END)
    if not found or not _is_thought(thoughts.rpartition(THOUGHT_START)[2]):
        return {**message, **named}
    stop = len(thoughts.rstrip())
    return {**message, **named, "content": f"{thoughts[:stop]}{mark}{thoughts[stop:]}{found}{answer}"}


def _is_thought(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())

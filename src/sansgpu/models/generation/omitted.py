"""Finds the parts of a conversation that a chat template leaves out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from sansgpu.config import ConfigError

ALWAYS_RENDERED = "role", "content"
CHECKED_ROLES = "tool", "developer"  # roles of turns that some templates skip


def omitted_parts(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    render: Callable[..., Any],
    skip: Collection[str] = (),
) -> Iterator[str]:
    """Names the parts without which `render(messages, tools)` gives the same result.

    Such parts are the tools, keys of turns other than role, content and those to `skip`, and contents of turns with
    special roles.
    """
    keys = dict.fromkeys(key for message in messages for key in message if key not in (*ALWAYS_RENDERED, *skip))
    roles = dict.fromkeys(message["role"] for message in messages if message["role"] in CHECKED_ROLES)
    if not (keys or roles or tools):
        return
    whole = render(messages, tools)

    def changes_nothing(other: Sequence[dict[str, Any]], other_tools: Sequence[Mapping[str, Any]] = tools) -> bool:
        try:
            return bool(render(other, other_tools) == whole)
        except ConfigError:  # the template refuses a conversation without the part
            return False

    if tools and changes_nothing(messages, ()):
        yield "tools"
    for key in keys:
        if changes_nothing([{name: part for name, part in m.items() if name != key} for m in messages]):
            yield f"{key} of a turn"
    for role in roles:
        changed = [{**m, "content": f"{m['content']}\nx"} if m["role"] == role else m for m in messages]
        if changes_nothing(changed):
            yield f"content of {role} turns"

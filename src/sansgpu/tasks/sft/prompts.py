"""Rows that a language model completes, and the rows with their completions, which `task: sft` reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sansgpu.data.rows import SourceRow, column_names, is_text
from sansgpu.tasks.sft.conversations import Message, bad_row, ordered_turns

FORMS = "prompt, messages or text"


@dataclass(frozen=True)
class Prompt:
    """One row: a conversation to answer, or else a text to continue."""

    where: str
    row: dict[str, Any]
    turns: tuple[Message, ...] = ()
    text: str = ""

    def completed(self, completion: str, reason: str) -> dict[str, Any]:
        """Returns the row with its completion; `text` and `messages` include it, a `prompt` does not."""
        row = {**self.row, "completion": completion, "finish_reason": reason}
        if "messages" in row:
            row["messages"] = [*row["messages"], {"role": "assistant", "content": row.pop("completion")}]
        elif "prompt" not in row:
            row["text"] += completion
        return row


def read_prompt(row: SourceRow) -> Prompt:
    """Parses a row. Raises BadRowError if there is nothing to complete."""
    where, value = row.where, row.readable_value()
    if not isinstance(value, dict):
        raise bad_row(where, f"is a {type(value).__name__}, not an object with {FORMS}")
    if not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise bad_row(where, "contains an unpaired surrogate, which is not valid text")
    name = next((name for name in ("messages", "prompt", "text") if value.get(name) is not None), None)
    if name is None:
        raise bad_row(where, f"has {column_names(value) or 'no columns'}, but not {FORMS}")
    content = value[name]
    if isinstance(content, str) and name != "messages":
        if not content.strip():
            raise bad_row(where, f"has an empty {name}")
        return Prompt(where, value, text=content) if name == "text" else _asked(where, value, content)
    if name == "text":
        raise bad_row(where, f"has a {type(content).__name__} in text, not text")
    turns = ordered_turns(where, content, name)
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise bad_row(where, f"has no user turn at the end of its {name} to answer")
    return Prompt(where, value, turns)


def _asked(where: str, row: dict[str, Any], prompt: str) -> Prompt:
    """As in `task: sft`, a prompt is a user turn if the model has a chat template, and a text to continue if not."""
    return Prompt(where, row, ({"role": "user", "content": prompt},), prompt)

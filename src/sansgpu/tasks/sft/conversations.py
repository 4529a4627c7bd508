"""Parses and validates conversations in four row formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sansgpu.data.rows import ROW_REMEDY, BadRowError, SourceRow, column_names, is_text, shorten

PROMPT_FORMS = "prompt, messages or text"


@dataclass(frozen=True)
class Prompt:
    """The content of a row for generation: a conversation to answer or a text to continue."""

    where: str
    row: dict[str, Any]
    turns: tuple[Message, ...] = ()
    text: str = ""

    def completed(self, completion: str, reason: str) -> dict[str, Any]:
        """Returns the row with the completion: as a new turn in `messages`, if it has them, otherwise as `completion`.

        If the prompt is a `text`, the completion is also appended to it.
        """
        row = {**self.row, "completion": completion, "finish_reason": reason}
        if "messages" in row:
            row["messages"] = [*row["messages"], {"role": "assistant", "content": row.pop("completion")}]
        elif "prompt" not in row:
            row["text"] += completion
        return row


def read_prompt(row: SourceRow) -> Prompt:
    """Parses a row. Raises BadRowError if it has no prompt, text or messages."""
    where, value = row.where, row.readable_value()
    if not isinstance(value, dict):
        raise bad_row(where, f"is of type {type(value).__name__} instead of an object with {PROMPT_FORMS}")
    if not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise bad_row(where, "contains an unpaired surrogate, which is not valid text")
    name = next((name for name in ("messages", "prompt", "text") if value.get(name) is not None), None)
    if name is None:
        raise bad_row(where, f"has {column_names(value) or 'no columns'}, but needs {PROMPT_FORMS}")
    content = value[name]
    if isinstance(content, str) and name != "messages":
        if not content.strip():
            raise bad_row(where, f"has an empty {name}")
        return Prompt(where, value, text=content) if name == "text" else _asked(where, value, content)
    if name == "text":
        raise bad_row(where, f"has a value of type {type(content).__name__} instead of a string in text")
    turns = ordered_turns(where, content, name)
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise bad_row(where, f"has no user message to answer at the end of its {name}")
    return Prompt(where, value, turns)


def _asked(where: str, row: dict[str, Any], prompt: str) -> Prompt:
    """Returns a prompt as a user turn for models with a chat template, and as a text to continue for others."""
    return Prompt(where, row, ({"role": "user", "content": prompt},), prompt)


Message = dict[str, Any]  # role, content, and any other keys for the chat template

FORMS = "messages, prompt and completion, instruction and output, or text"
# For each role, the roles of the turn that may precede it; None: it may be the first turn.
FOLLOWS: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
# Stanford Alpaca's prompts, which are used for models without a chat template.
INSTRUCTION = "### Instruction:\n{instruction}\n\n### Response:\n"
INSTRUCTION_WITH_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


@dataclass(frozen=True)
class Conversation:
    """The content of a row: `turns`, or a `text` in which every token is a target."""

    where: str
    turns: tuple[Message, ...] = ()
    first: int = 0  # index of the first turn with targets
    plain: tuple[str, str] | None = None  # prompt and answer, for tokenizers without a chat template
    text: str | None = None
    parse_special: bool = False  # whether the texts of special tokens in messages become the tokens

    def later_questions(self) -> list[int]:
        """Returns the indices of the user turns with an answer after them, except the first one."""
        turns = [(n, turn["role"]) for n, turn in enumerate(self.turns)]
        last_answer = max((n for n, role in turns if role == "assistant"), default=0)
        return [n for n, role in turns if role == "user" and n < last_answer][1:]

    def from_question(self, number: int) -> Conversation:
        """Returns the conversation from turn `number`, a question, to its end, preceded by the system message."""
        system = self.turns[: next(n for n, turn in enumerate(self.turns) if turn["role"] == "user")]
        first = max(0, self.first - number + len(system))
        return replace(self, turns=system + self.turns[number:], first=first)


def bad_row(where: str, problem: str) -> BadRowError:
    """Returns the error for an invalid row."""
    return BadRowError(f"{where} {shorten(problem)}{ROW_REMEDY}")


def read_conversation(row: SourceRow) -> Conversation:
    """Parses a row. Raises BadRowError if it is not a valid conversation."""
    where, value = row.where, row.readable_value()
    if not isinstance(value, dict):
        raise bad_row(where, f"is of type {type(value).__name__} instead of an object with {FORMS}")
    conversation = _read(where, {name: entry for name, entry in value.items() if entry is not None})
    content = json.dumps([conversation.turns, conversation.text], ensure_ascii=False, default=str)
    if not is_text(content):
        raise bad_row(where, "contains an unpaired surrogate, which is not valid text")
    return conversation


def _read(where: str, row: dict[str, Any]) -> Conversation:
    if "messages" in row:
        turns = tuple(read_turns(where, row["messages"], "messages"))
        return Conversation(where, check_turns(where, turns, 0))
    if "prompt" in row and "completion" in row:
        return _completion(where, row["prompt"], row["completion"])
    if "instruction" in row and "output" in row:
        return _instruction(where, row)
    if "text" in row:
        return Conversation(where, text=_nonempty(where, row, "text"))
    columns = column_names(row) or "no columns"
    raise bad_row(where, f"has {columns}, but needs {FORMS}")


def _completion(where: str, prompt: Any, completion: Any) -> Conversation:
    plain = None
    if isinstance(prompt, str) and isinstance(completion, str):
        plain = (prompt, _nonempty(where, {"completion": completion}, "completion"))
    prompt_turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion_turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    before = tuple(read_turns(where, prompt_turns, "prompt"))
    turns = (*before, *read_turns(where, completion_turns, "completion", len(before)))
    return Conversation(where, check_turns(where, turns, len(before)), len(before), plain)


def _instruction(where: str, row: dict[str, Any]) -> Conversation:
    instruction, context, output = (
        _string(where, row, "instruction"),
        _string(where, {"input": "", **row}, "input"),
        _nonempty(where, row, "output"),
    )
    user_text, template = instruction, INSTRUCTION
    if context.strip():
        user_text, template = f"{instruction}\n\n{context}", INSTRUCTION_WITH_INPUT
    turns = ({"role": "user", "content": user_text}, {"role": "assistant", "content": output})
    return Conversation(where, turns, 1, (template.format(instruction=instruction, input=context), output))


def _string(where: str, row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise bad_row(where, f"has a value of type {type(value).__name__} instead of a string in {column}")
    return value


def _nonempty(where: str, row: dict[str, Any], column: str) -> str:
    text = _string(where, row, column)
    if not text.strip():
        raise bad_row(where, f"has an empty {column}")
    return text


def read_turns(where: str, values: Any, column: str, before: int = 0) -> Iterator[Message]:
    """Yields the turns in a row's column. `before` is the number of turns before them, for turn numbers in errors."""
    if not isinstance(values, (list, tuple)):
        raise bad_row(
            where,
            f"has a value of type {type(values).__name__} in {column} instead of a list of objects with role and "
            "content",
        )
    for number, value in enumerate(values, before + 1):
        yield _turn(where, number, value)


def _turn(where: str, number: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise bad_row(
            where,
            f"has a value of type {type(value).__name__} as turn {number} instead of an object with role and content",
        )
    turn = {name: part for name, part in value.items() if part is not None}
    role, content = turn.get("role"), _joined(turn.get("content"))
    if role not in tuple(FOLLOWS):
        raise bad_row(where, f"has the unknown role {role!r} in turn {number}; known roles are {', '.join(FOLLOWS)}")
    calls = role == "assistant" and bool(turn.get("tool_calls"))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise bad_row(
            where, f"has a value of type {type(content).__name__} instead of a string as the content of turn {number}"
        )
    if role == "assistant" and not calls and not content.strip():
        raise bad_row(where, f"has an empty answer in turn {number}")
    return {**turn, "content": content}


def _joined(content: Any) -> Any:
    """Joins content that is a list of text parts to one string; returns other content unchanged."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def check_turns(where: str, turns: Sequence[Message], first: int) -> tuple[Message, ...]:
    """Checks the order of turns, and that there is an assistant turn at index `first` or later. Returns the turns."""
    in_order = _in_order(where, turns)
    if not any(turn["role"] == "assistant" for turn in turns[first:]):
        raise bad_row(where, "has no assistant turn to learn from")
    return in_order


def ordered_turns(where: str, values: Any, column: str) -> tuple[Message, ...]:
    """Returns the turns in a column of a row. Raises BadRowError if one is invalid, or they are in the wrong order."""
    return _in_order(where, tuple(read_turns(where, values, column)))


def _in_order(where: str, turns: Sequence[Message]) -> tuple[Message, ...]:
    before: str | None = None
    for number, turn in enumerate(turns, 1):
        role = turn["role"]
        if before not in FOLLOWS[role]:
            order = f"follows {before}" if before else "is the first"
            raise bad_row(where, f"has its turns in the wrong order: turn {number} ({role}) {order}")
        before = role
    return tuple(turns)

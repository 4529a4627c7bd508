"""Chats: conversations to learn from, and prompts to complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sansgpu.data.forms.answers import ANSWER_COLUMNS
from sansgpu.data.forms.form import Form, Forms
from sansgpu.data.rows import Row, SourceRow, TypedRow, bad_row, is_text
from sansgpu.data.tables import Columns

Message = dict[str, Any]  # role, content, and any other keys for the chat template

Role = Literal["system", "developer", "user", "assistant", "tool"]
# For each role, the roles of the turn that may precede it; None: it may be the first turn.
FOLLOWS: dict[Role, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
ANSWERED_ROLES = "user", "tool"  # roles of a turn that the model can answer
# ShareGPT's names of roles -> transformers' names.
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_PROMPT_COLUMNS = ("messages", "prompt", "text", "conversations", "question", "problem")
# Stanford Alpaca's prompts, which are used for models without a chat template.
INSTRUCTION = "### Instruction:\n{instruction}\n\n### Response:\n"
INSTRUCTION_WITH_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


@dataclass(frozen=True)
class Conversation(TypedRow):
    """The content of a row: `turns`, or a `text` in which every token is a target."""

    turns: tuple[Message, ...] = ()
    first: int = 0  # index of the first turn whose answer is a target
    plain: tuple[str, str] | None = None  # prompt and answer, for tokenizers without a chat template
    text: str | None = None
    parse_special: bool = False  # True: the texts of special tokens in messages are read as these tokens

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


@dataclass(frozen=True)
class Prompt(TypedRow):
    """The content of a row for generation: a conversation to answer or a text to continue."""

    row: Row
    turns: tuple[Message, ...] = ()
    text: str = ""

    @property
    def columns(self) -> Row:
        """The columns beside the prompt, on which a reward may depend."""
        return {name: value for name, value in self.row.items() if name not in ("prompt", "messages", "text")}

    def completed(self, completion: str, reason: str) -> Row:
        """Returns the row with the completion: as a new turn if it has a list of turns, otherwise as `completion`.

        If the prompt is a `text`, the completion is also appended to it.
        """
        row = {**self.row, "completion": completion, "finish_reason": reason}
        given = next(name for name in _PROMPT_COLUMNS if row.get(name) is not None)
        if given == "text":
            row["text"] += completion
        elif given in ("messages", "conversations"):
            turns = row["messages"] if given == "messages" else self.turns
            row["messages"] = [*turns, {"role": "assistant", "content": row.pop("completion")}]
        return row


def _require_unicode(row: SourceRow, content: Any) -> None:
    if not is_text(json.dumps(content, ensure_ascii=False, default=str)):
        raise bad_row(row.where, "contains an unpaired surrogate, which is not valid text")


def _string(row: SourceRow, column: str) -> str:
    value = row.value[column]
    if not isinstance(value, str):
        raise bad_row(row.where, f"has a value of type {type(value).__name__} instead of a string in {column}")
    return value


def _nonempty(row: SourceRow, column: str) -> str:
    text = _string(row, column)
    require_nonempty(row.where, text, column)
    return text


def require_nonempty(where: str, text: Any, column: str) -> None:
    """Raises BadRowError if `text` is a string without content."""
    if isinstance(text, str) and not text.strip():
        raise bad_row(where, f"has an empty {column}")


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
    if "from" in value and "value" in value:
        others = {name: part for name, part in value.items() if name not in ("from", "value")}
        value = {**others, "role": role_of(value), "content": value["value"]}
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


def role_of(turn: Any) -> Any:
    """Returns the role in a turn, which may be in ShareGPT's form, with `from` and `value`."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return ROLES.get(role, role) if isinstance(role, str) else role


def _joined(content: Any) -> Any:
    """Joins content that is a list of text parts to one string; returns other content unchanged."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def _in_order(where: str, turns: Sequence[Message]) -> tuple[Message, ...]:
    before: str | None = None
    for number, turn in enumerate(turns, 1):
        role = turn["role"]
        if before not in FOLLOWS[role]:
            order = f"follows {before}" if before else "is the first"
            raise bad_row(where, f"has its turns in the wrong order: turn {number} ({role}) {order}")
        before = role
    return tuple(turns)


def all_turns(row: SourceRow, values: Any, column: str) -> list[Message]:
    """Returns the turns in a column after the message in the column `system`, unless they begin with it."""
    system = row.value.get("system")
    first = [*read_turns(row.where, [{"role": "system", "content": system}], "system")] if system else []
    turns = [*read_turns(row.where, values, column, len(first))]
    return turns if turns[:1] == first else first + turns


def build_conversation(
    row: SourceRow, turns: Sequence[Message], first: int, plain: tuple[str, str] | None = None
) -> Conversation:
    """Returns a conversation whose answers from turn `first` on are learned. Raises BadRowError if there are none."""
    in_order = _in_order(row.where, turns)
    if not any(turn["role"] == "assistant" for turn in turns[first:]):
        raise bad_row(row.where, "has no assistant turn to learn from")
    _require_unicode(row, turns)
    return Conversation(row.where, in_order, first, plain)


def prompt_and_answer(row: SourceRow, prompt: Any, answer: Any, column: str) -> Conversation:
    """Builds a conversation from a prompt (text or list of turns) and an answer (text, turn or list of turns)."""
    require_nonempty(row.where, answer, column)
    plain = (_after_system(row, prompt), answer) if isinstance(prompt, str) and isinstance(answer, str) else None
    before = all_turns(row, _as_turns(prompt, "user"), "prompt")
    after = read_turns(row.where, _as_turns(answer, "assistant"), column, len(before))
    return build_conversation(row, [*before, *after], len(before), plain)


def _as_turns(value: Any, role: str) -> Any:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [value] if isinstance(value, dict) else value


def _after_system(row: SourceRow, prompt: str) -> str:
    """Returns a prompt after the message in the column `system`, for models without a chat template."""
    system = row.value.get("system")
    return f"{system}\n\n{prompt}" if system else prompt


def _conversation_in(column: str) -> Callable[[SourceRow, Columns], Conversation]:
    return lambda row, columns: build_conversation(row, all_turns(row, row.value[column], column), 0)


def _completion(row: SourceRow, columns: Columns) -> Conversation:
    return prompt_and_answer(row, row.value["prompt"], row.value["completion"], "completion")


def _instruction(row: SourceRow, columns: Columns) -> Conversation:
    instruction, output = _string(row, "instruction"), _string(row, "output")
    context = "" if row.value.get("input") is None else _string(row, "input")
    prompt, template = instruction, INSTRUCTION
    if context.strip():
        prompt, template = f"{instruction}\n\n{context}", INSTRUCTION_WITH_INPUT
    plain = _after_system(row, template.format(instruction=instruction, input=context)), output
    return replace(prompt_and_answer(row, prompt, output, "output"), plain=plain)


def _text(row: SourceRow, columns: Columns) -> Conversation:
    text = _nonempty(row, "text")
    _require_unicode(row, text)
    return Conversation(row.where, text=text)


_QUESTION, _ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}
_HUMAN, _GPT = {"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}

CONVERSATIONS = Forms("messages, prompt and completion, instruction and output, or text", (
    Form(("messages",), _conversation_in("messages"), {"messages": [_QUESTION, _ANSWER]}, ("system",)),
    Form(("prompt", "completion"), _completion, {"prompt": "What is 2 + 2?", "completion": "4"}, ("system",)),
    Form(("instruction", "output"), _instruction,
         {"instruction": "Translate to German.", "input": "two", "output": "zwei"}, ("input", "system")),
    Form(("text",), _text, {"text": "A text of which all tokens are learned."}),
    Form(("conversations",), _conversation_in("conversations"),
         {"system": "Answer briefly.", "conversations": [_HUMAN, _GPT]}, ("system",)),
))  # fmt: skip


def _build_prompt(row: SourceRow, values: Any, column: str) -> Prompt:
    turns = _in_order(row.where, all_turns(row, values, column))
    if not turns or turns[-1]["role"] not in ANSWERED_ROLES:
        raise bad_row(row.where, f"has no user message to answer at the end of its {column}")
    _require_unicode(row, row.value)  # all of it, because it is written with the answer
    return Prompt(row.where, row.value, turns)


def _prompt_in(column: str) -> Callable[[SourceRow, Columns], Prompt]:
    return lambda row, columns: _build_prompt(row, row.value[column], column)


def _question_in(column: str) -> Callable[[SourceRow, Columns], Prompt]:
    """Reads a prompt: a user turn for models with a chat template, and a text to continue for others."""

    def read(row: SourceRow, columns: Columns) -> Prompt:
        prompt = row.value[column]
        require_nonempty(row.where, prompt, column)
        found = _build_prompt(row, _as_turns(prompt, "user"), column)
        return replace(found, text=_after_system(row, prompt)) if isinstance(prompt, str) else found

    return read


def _text_prompt(row: SourceRow, columns: Columns) -> Prompt:
    _require_unicode(row, row.value)
    return Prompt(row.where, row.value, text=_nonempty(row, "text"))


PROMPTS = Forms("prompt, messages, text or question", (
    Form(("messages",), _prompt_in("messages"), {"messages": [_QUESTION], "answer": "4"}, ("system", *ANSWER_COLUMNS)),
    Form(("prompt",), _question_in("prompt"), {"prompt": "What is 2 + 2?", "answer": "4"}, ("system", *ANSWER_COLUMNS)),
    Form(("text",), _text_prompt, {"text": "2 + 2 =", "answer": "4"}, ANSWER_COLUMNS),
    Form(("conversations",), _prompt_in("conversations"), {"conversations": [_HUMAN]}, ("system", *ANSWER_COLUMNS)),
    Form(("question",), _question_in("question"),
         {"question": "What is 2 + 2?", "answer": "2 + 2 = 4\n#### 4"}, ("system", *ANSWER_COLUMNS)),
    Form(("problem",), _question_in("problem"),
         {"problem": "What is 2 + 2?", "solution": "It is $\\boxed{4}$."}, ("system", *ANSWER_COLUMNS)),
))  # fmt: skip

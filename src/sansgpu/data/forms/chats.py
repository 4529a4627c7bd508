"""Chats: conversations to learn from, and prompts to complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from sansgpu.config.data import DataConfig
from sansgpu.data.forms.answers import ANSWER_COLUMNS
from sansgpu.data.forms.chat_columns import (
    CHATGPT,
    CONTEXT_COLUMNS,
    MEDIA_COLUMNS,
    SYSTEM_COLUMNS,
    TOOLS_COLUMNS,
    Tools,
    after_system,
    all_turns,
    answer_in,
    chat_columns,
    context_of,
    current_branch,
    first_column,
    has_values,
    history_turns,
    is_chatgpt,
    is_glaive,
    nonempty_in,
    only_text,
    read_tools,
    require_nonempty,
    require_unicode,
    row_of_turns,
    string_in,
    without_marks,
)
from sansgpu.data.forms.form import USUAL, Form, Forms, is_empty, unused_columns
from sansgpu.data.forms.turns import (
    ANSWERED_ROLES,
    SYSTEM_ROLES,
    Message,
    as_turns,
    chatml_turns,
    looks_like_turns,
    merged_turns,
    read_turns,
    turns_in_text,
    unused_of_parts,
    with_calls,
)
from sansgpu.data.rows import Row, SourceRow, TypedRow, bad_row
from sansgpu.data.tables import Columns

# Columns with turns besides `messages`, which only count if they have a list of turns.
TURN_COLUMNS = "conversations", "conversation", "dialogue", "dialog", "turns", "chat", "chat_messages", "data"
INSTRUCTION_COLUMNS = "instruction", "question", "query", "problem"
# Columns with a question and its answer, besides prompt and completion, and instruction and output.
PAIRS = (
    *(("prompt", answer) for answer in ("response", "output", "answer")),
    *((asked, "solution") for asked in ("problem", "question")),  # before `answer`, which may be its last number only
    *((asked, answer) for asked in INSTRUCTION_COLUMNS for answer in ("output", "response", "answer", "completion")),
    ("input", "output"),
    ("inputs", "targets"),
)
# Stanford Alpaca's prompts, which are used for models without a chat template.
INSTRUCTION = "### Instruction:\n{instruction}\n\n### Response:\n"
INSTRUCTION_WITH_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


@dataclass(frozen=True)
class Conversation(TypedRow):
    """The content of a row: `turns`, or a `text` in which every token is a target.

    With both, the text consists of ChatML turns: the turns are for tokenizers with a chat template.
    """

    turns: tuple[Message, ...] = ()
    first: int = 0  # index of the first turn whose answer is a target
    plain: tuple[str, str] | None = None  # prompt and answer, for tokenizers without a chat template
    text: str | None = None
    parse_special: bool = False  # True: the texts of special tokens in messages are read as these tokens
    tools: Tools = ()
    unlearned: frozenset[int] = frozenset()  # indices of answers that are no targets

    @property
    def learned_turns(self) -> list[int]:
        """The indices of the turns that are targets."""
        learned = range(self.first, len(self.turns))
        return [n for n in learned if self.turns[n]["role"] == "assistant" and n not in self.unlearned]

    def later_questions(self) -> list[int]:
        """Returns the indices of the user turns with an answer after them, except the first one."""
        turns = [(n, turn["role"]) for n, turn in enumerate(self.turns)]
        last_answer = max((n for n, role in turns if role == "assistant"), default=0)
        return [n for n, role in turns if role == "user" and n < last_answer][1:]

    def from_question(self, number: int) -> Conversation:
        """Returns the conversation from turn `number`, a question, to its end, preceded by the system message."""
        system = tuple(takewhile(lambda turn: turn["role"] in SYSTEM_ROLES, self.turns))
        shift = len(system) - number
        first, unlearned = max(0, self.first + shift), frozenset(n + shift for n in self.unlearned if n >= number)
        return replace(self, turns=system + self.turns[number:], first=first, unlearned=unlearned)

    def for_template(self, exists: bool) -> Conversation:
        """Returns the conversation with either turns or a text, depending on whether a chat template exists."""
        if self.text is None or not self.turns:
            return self
        return replace(self, text=None) if exists else replace(self, turns=())

    def merged(self) -> Conversation:
        """Returns the conversation with merged turns, see `merged_turns`."""
        merged = merged_turns(self.turns, self.first)
        first = next((n for n, (_, parts) in enumerate(merged) if self.first in parts), 0)
        unlearned = frozenset(n for n, (_, parts) in enumerate(merged) if self.unlearned & {*parts})
        return replace(self, turns=tuple(turn for turn, _ in merged), first=first, unlearned=unlearned)


@dataclass(frozen=True)
class ConversationOptions:
    """The configuration keys that apply to conversations in all forms of rows."""

    columns: Columns = USUAL
    merge_turns: bool = False
    parse_special: bool = False
    last_answer_only: bool = False

    @classmethod
    def of(cls, data: DataConfig, learn: str = "all") -> ConversationOptions:
        return cls(Columns.of(data), data.merge_turns, data.parse_special_tokens, learn == "last")

    def applied_to_prompt(self, prompt: Prompt) -> Prompt:
        merged = tuple(turn for turn, _ in merged_turns(prompt.turns))
        return replace(prompt, turns=merged) if self.merge_turns else prompt

    def applied(self, conversation: Conversation) -> Conversation:
        """Raises BadRowError if nothing is left to learn."""
        found = conversation
        if found.parse_special != self.parse_special:
            found = replace(found, parse_special=self.parse_special)
        found = found.merged() if self.merge_turns else found
        if self.last_answer_only and found.turns:
            answers = (n for n, turn in enumerate(found.turns) if turn["role"] == "assistant")
            found = replace(found, first=max(answers, default=0))
        if found.turns and not found.learned_turns:
            raise bad_row(found.where, "has no assistant turn to learn from")
        return found


@dataclass(frozen=True)
class Prompt(TypedRow):
    """The content of a row for generation: a conversation to answer or a text to continue."""

    row: Row
    turns: tuple[Message, ...] = ()
    text: str = ""
    tools: Tools = ()
    column: str = "text"  # the column with the prompt

    @property
    def columns(self) -> Row:
        """The columns beside the prompt, on which a reward may depend."""
        return {name: value for name, value in self.row.items() if name not in ("prompt", "messages", "text")}

    @property
    def has_turns(self) -> bool:
        """True if a completion becomes a new turn of the row."""
        return self.column == "messages" or self.column in TURN_COLUMNS

    def completed(self, completion: str, reason: str, calls: Sequence[Message] = ()) -> Row:
        """Returns the row with the completion: as a new turn if it has a list of turns, otherwise as `completion`.

        A turn also has the `calls` of the completion, if any. A `text` is continued with the completion.
        """
        row = {**self.row, "completion": completion, "finish_reason": reason}
        if self.column == "text":
            row["text"] += completion
        elif self.has_turns:
            turns = row["messages"] if isinstance(row.get("messages"), list) else self.turns
            called = {"tool_calls": [*calls]} if calls else {}
            row["messages"] = [*turns, {"role": "assistant", "content": row.pop("completion"), **called}]
        return row


def build_conversation(
    row: SourceRow, turns: Sequence[Message], first: int, columns: Columns = USUAL, plain: tuple[str, str] | None = None
) -> Conversation:
    """Returns a conversation whose answers from turn `first` on are learned. Raises BadRowError if there are none."""
    unlearned = frozenset(n for n, turn in enumerate(turns) if turn["role"] == "assistant" and "weight" in turn)
    shown = tuple(without_weight(turn) if n in unlearned else turn for n, turn in enumerate(turns))
    found = Conversation(row.where, shown, first, plain, tools=read_tools(row, columns), unlearned=unlearned)
    if not found.learned_turns:
        raise bad_row(row.where, "has no assistant turn to learn from")
    require_unicode(row, [*turns, *found.tools])
    return found


def without_weight(turn: Message) -> Message:
    return {key: part for key, part in turn.items() if key != "weight"}


def prompt_and_answer(row: SourceRow, prompt: Any, answer: Any, column: str, columns: Columns = USUAL) -> Conversation:
    """Builds a conversation from a prompt (text or list of turns) and an answer (text, turn or list of turns).

    Only the answer is learned. Turns in the column `history` precede the prompt.
    """
    prompt, answer = turns_in_text(prompt), only_text(row, turns_in_text(answer), column, "answer")
    require_nonempty(row.where, answer, column)
    asked, history = as_turns(prompt, "user"), history_turns(row)
    plain = None
    if isinstance(prompt, str) and isinstance(answer, str) and not history:
        plain = after_system(row, prompt, columns), answer
    if history:
        asked = [*history, *read_turns(row.where, asked, "prompt", len(history))]
    before = all_turns(row, asked, "prompt", columns)
    after = read_turns(row.where, as_turns(answer, "assistant"), column, len(before))
    return build_conversation(row, [*before, *after], len(before), columns, plain)


def instruction_and_answer(row: SourceRow, asked: str, answer: str, columns: Columns = USUAL) -> Conversation:
    """Builds a conversation from an instruction in column `asked`, the context that the row may have, and an answer."""
    instruction, context = string_in(row, asked), context_of(row)
    prompt, template = instruction, INSTRUCTION
    if context.strip():
        prompt = f"{instruction}\n\n{context}" if instruction.strip() else context
        template = INSTRUCTION_WITH_INPUT
    require_nonempty(row.where, prompt, asked)
    found = prompt_and_answer(row, prompt, answer_in(row, answer), answer, columns)
    if found.plain is None:
        return found
    written = template.format(instruction=instruction, input=context)
    return replace(found, plain=(after_system(row, written, columns), found.plain[1]))


def _conversation_in(column: str) -> Callable[[SourceRow, Columns], Conversation]:
    return lambda row, columns: build_conversation(row, all_turns(row, row.value[column], column, columns), 0, columns)


def _with_learned_history(row: SourceRow, found: Conversation) -> Conversation:
    """Returns a conversation in which the answers of the history are learned, too, as LLaMA-Factory learns them."""
    return found if is_empty(row.value.get("history")) else replace(found, first=0)


def _pair_in(asked: str, answer: str) -> Callable[[SourceRow, Columns], Conversation]:
    def read(row: SourceRow, columns: Columns) -> Conversation:
        if asked in INSTRUCTION_COLUMNS:
            return _with_learned_history(row, instruction_and_answer(row, asked, answer, columns))
        prompt = only_text(row, row.value[asked], asked, "prompt")
        if (asked, prompt) != ("prompt", ""):  # an empty prompt means that nothing precedes the completion
            require_nonempty(row.where, prompt, asked)
        found = prompt_and_answer(row, prompt, answer_in(row, answer), answer, columns)
        return _with_learned_history(row, found)

    return read


def _calls(row: SourceRow, columns: Columns) -> Conversation:
    """Reads a question with the calls of tools that answer it, as in xLAM's rows."""
    call = with_calls(row.where, 2, {"role": "assistant", "content": "", "tool_calls": row.value["answers"]})
    if not call.get("tool_calls"):
        raise bad_row(row.where, "has no answers")
    turns = all_turns(row, [{"role": "user", "content": row.value["query"]}, call], "query", columns)
    return build_conversation(row, turns, 0, columns)


def _text(row: SourceRow, columns: Columns) -> Conversation:
    text = nonempty_in(row, "text")
    require_unicode(row, text)
    if not (turns := _answered_turns(text)):
        return Conversation(row.where, text=text)
    return replace(build_conversation(row, all_turns(row, turns, "text", columns), 0, columns), text=text)


def _answered_turns(text: Any) -> list[Message]:
    """Returns the turns of a text that consists of ChatML turns and has an answer; of other texts, an empty list."""
    turns = chatml_turns(text) if isinstance(text, str) else []
    return turns if any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns) else []


def _unused_beside_text(row: Row, columns: Columns) -> Iterator[str]:
    chosen = chat_columns(row, columns) if _answered_turns(row["text"]) else ()
    return unused_columns(row, ("text", *(name for name in chosen if name is not None)), columns)


def _converted(convert: Callable[[SourceRow], Row]) -> Callable[[SourceRow, Columns], Conversation]:
    """Returns a function that reads rows which `convert` changes to rows with `messages`."""

    def read(row: SourceRow, columns: Columns) -> Conversation:
        return _conversation_in("messages")(row._replace(value=convert(row)), columns)

    return read


def chat_form(
    keys: tuple[str, ...],
    read: Callable[[SourceRow, Columns], Any],
    example: Mapping[str, Any],
    optional: tuple[str, ...] = (),
    recognizes: Callable[[Row, Columns], bool] | None = None,
) -> Form[Any]:
    """Returns a form that also uses the columns of the system message and of tools."""
    has_context = "history" in optional and bool({*keys} & {*INSTRUCTION_COLUMNS})

    def unused(row: Row, columns: Columns) -> Iterator[str]:
        context = first_column(row, CONTEXT_COLUMNS) if has_context else None
        chosen = (*chat_columns(row, columns), context)
        yield from unused_columns(row, (*keys, *optional, *(name for name in chosen if name is not None)), columns)
        yield from dict.fromkeys(name for key in (*keys, *optional) for name in unused_of_parts(row.get(key)))

    further = (*optional, *(CONTEXT_COLUMNS if has_context else ()), *SYSTEM_COLUMNS, *TOOLS_COLUMNS)
    return Form(keys, read, example, further, recognizes or has_values(keys), unused=unused)


def turns_form(column: str, read: Callable[[SourceRow, Columns], Any], example: Any, **used: Any) -> Form[Any]:
    """Returns a form for a column that may also have other content than turns."""
    return chat_form((column,), read, example, recognizes=lambda row, _: looks_like_turns(row.get(column)), **used)


_QUESTION, _ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}
_HUMAN, _GPT = {"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds numbers."}}
_PAIR = {"input": "What is 2 + 2?", "output": "4"}

CONVERSATIONS = Forms("messages, prompt and completion, instruction and output, or text", (
    chat_form(("messages",), _conversation_in("messages"), {"messages": [_QUESTION, _ANSWER], "tools": [_TOOL]}),
    chat_form(("prompt", "completion"), _pair_in("prompt", "completion"),
              {"prompt": "What is 2 + 2?", "completion": "4"}, ("history",)),
    chat_form(("instruction", "output"), _pair_in("instruction", "output"),
              {"instruction": "Translate to German.", "input": "two", "output": "zwei"}, ("history",)),
    chat_form(("conversations",), _conversation_in("conversations"),
              {"system": "Answer briefly.", "conversations": [_HUMAN, _GPT]}),
    chat_form(("query", "tools", "answers"), _calls,
              {"query": "What is 2 + 2?", "tools": [_TOOL],
               "answers": '[{"name": "add", "arguments": {"a": 2, "b": 2}}]'}),
    chat_form(("mapping",), _converted(current_branch), CHATGPT, ("current_node",), recognizes=is_chatgpt),
    chat_form(("system", "chat"), _converted(without_marks),
              {"system": "SYSTEM: You are a helpful assistant.", "chat": "USER: What is 2 + 2?\n\nASSISTANT: 4"},
              recognizes=is_glaive),
    *(chat_form(pair, _pair_in(*pair), dict(zip(pair, ("What is 2 + 2?", "4"), strict=True)), ("history",))
      for pair in PAIRS if pair != ("instruction", "output")),
    Form(("text",), _text, {"text": "A text of which all tokens are learned."}, unused=_unused_beside_text),
    *(turns_form(column, _conversation_in(column), {column: [_PAIR]}) for column in TURN_COLUMNS[1:]),
), list_row=row_of_turns, other_names=MEDIA_COLUMNS)  # fmt: skip


def _build_prompt(row: SourceRow, values: Any, column: str, columns: Columns) -> Prompt:
    history = history_turns(row) if column not in ("messages", *TURN_COLUMNS) else []
    if history:
        values = [*history, *read_turns(row.where, values, column, len(history))]
    turns = all_turns(row, values, column, columns)
    if not turns or turns[-1]["role"] not in ANSWERED_ROLES:
        raise bad_row(row.where, f"has no user message to answer at the end of its {column}")
    require_unicode(row, row.value)  # all of it, because it is written with the answer
    shown = tuple(without_weight(turn) for turn in turns)
    return Prompt(row.where, row.value, shown, tools=read_tools(row, columns), column=column)


def _prompt_in(column: str) -> Callable[[SourceRow, Columns], Prompt]:
    return lambda row, columns: _build_prompt(row, row.value[column], column, columns)


def _prompt(row: SourceRow, columns: Columns) -> Prompt:
    """Reads a prompt: a user turn for models with a chat template, and a text to continue for others."""
    prompt = only_text(row, turns_in_text(row.value["prompt"]), "prompt", "prompt")
    require_nonempty(row.where, prompt, "prompt")
    found = _build_prompt(row, as_turns(prompt, "user"), "prompt", columns)
    is_text = isinstance(prompt, str) and is_empty(row.value.get("history"))
    return replace(found, text=after_system(row, prompt, columns)) if is_text else found


def _instruction_prompt_in(column: str) -> Callable[[SourceRow, Columns], Prompt]:
    def read(row: SourceRow, columns: Columns) -> Prompt:
        instruction, context = nonempty_in(row, column), context_of(row)
        prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
        found = _build_prompt(row, as_turns(prompt, "user"), column, columns)
        is_text = is_empty(row.value.get("history"))
        return replace(found, text=after_system(row, prompt, columns)) if is_text else found

    return read


def _text_prompt(row: SourceRow, columns: Columns) -> Prompt:
    require_unicode(row, row.value)
    return Prompt(row.where, row.value, text=nonempty_in(row, "text"))


PROMPTS = Forms("prompt, messages or text", (
    chat_form(("messages",), _prompt_in("messages"), {"messages": [_QUESTION], "answer": "4"}, ANSWER_COLUMNS),
    chat_form(("prompt",), _prompt, {"prompt": "What is 2 + 2?", "answer": "4"}, (*ANSWER_COLUMNS, "history")),
    Form(("text",), _text_prompt, {"text": "2 + 2 =", "answer": "4"}, ANSWER_COLUMNS),
    chat_form(("conversations",), _prompt_in("conversations"), {"conversations": [_HUMAN], "answer": "4"},
              ANSWER_COLUMNS),
    *(chat_form((column,), _instruction_prompt_in(column), {column: "What is 2 + 2?", "answer": "4"},
                (*ANSWER_COLUMNS, "history")) for column in INSTRUCTION_COLUMNS),
    *(turns_form(column, _prompt_in(column), {column: [_QUESTION]}, optional=ANSWER_COLUMNS)
      for column in TURN_COLUMNS[1:]),
), list_row=row_of_turns, other_names=MEDIA_COLUMNS)  # fmt: skip

"""Parses and tokenizes preferences: prompts with a chosen and a rejected answer, or with one rated answer."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.data.rows import BadRows, SourceRow, column_names, is_text
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.tasks.sft.chat import MaskedConversation, mask_conversation
from sansgpu.tasks.sft.conversations import Conversation, Message, bad_row, check_turns, read_turns
from sansgpu.tasks.sft.notes import special_text_notes

ROW_FORMS = (
    "prompt, chosen and rejected; chosen and rejected; conversations, chosen and rejected; messages and label; or "
    "prompt, completion and label"
)
# ShareGPT's names of roles -> transformers' names.
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
# The keys True and False also match the numbers 1 and 0.
LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class PreferenceRow:
    """A row: the chosen and the rejected conversation, with the same prompt, or one conversation with its rating."""

    where: str
    conversations: tuple[Conversation, ...]
    label: bool | None = None  # rating of a single answer: True for good; None for pairs

    @property
    def rated(self) -> list[tuple[Conversation, bool]]:
        """Returns each conversation with its rating."""
        if self.label is not None:
            return [(self.conversations[0], self.label)]
        return list(zip(self.conversations, (True, False), strict=True))


def read_preference(row: SourceRow) -> PreferenceRow:
    """Parses a row. Raises BadRowError if it has no valid preference."""
    where, value = row.where, row.readable_value()
    if not isinstance(value, dict):
        raise bad_row(where, f"is of type {type(value).__name__} instead of an object with {ROW_FORMS}")
    values = {name: entry for name, entry in value.items() if entry is not None}
    if not is_text(json.dumps(values, ensure_ascii=False, default=str)):
        raise bad_row(where, "contains an unpaired surrogate, which is not valid text")
    if "chosen" in values and "rejected" in values:
        return PreferenceRow(where, _pair(where, values))
    if "label" in values and ("messages" in values or "conversations" in values):
        return PreferenceRow(where, (_rated_conversation(where, values),), _label(where, values["label"]))
    if {"label", "prompt", "completion"} <= values.keys():
        answer = _conversation(where, values["prompt"], values["completion"], "completion")
        return PreferenceRow(where, (answer,), _label(where, values["label"]))
    raise bad_row(where, f"has {column_names(values) or 'no columns'}, but rows need {ROW_FORMS}")


def _pair(where: str, values: dict[Any, Any]) -> tuple[Conversation, Conversation]:
    chosen, rejected = values["chosen"], values["rejected"]
    if chosen == rejected:
        raise bad_row(where, "has identical chosen and rejected answers")
    if "conversations" in values:
        prompt: Any = _with_system(values, values["conversations"])
    elif "prompt" in values and not _includes_prompt(chosen):
        prompt = values["prompt"]
    else:
        prompt, chosen, rejected = _common_prompt(where, chosen, rejected)
    first, second = (
        _conversation(where, prompt, answer, name) for name, answer in (("chosen", chosen), ("rejected", rejected))
    )
    return first, second


def _includes_prompt(answer: Any) -> bool:
    """Returns whether a list of turns includes the prompt, as in ultrafeedback_binarized."""
    return isinstance(answer, list) and bool(answer) and _role(answer[0]) in ("system", "developer", "user")


def _with_system(values: dict[Any, Any], turns: Any) -> Any:
    """Adds a system message from a separate column, as in LLaMA-Factory's format, to the turns."""
    system = values.get("system")
    return [{"role": "system", "content": system}, *turns] if system and isinstance(turns, list) else turns


def _common_prompt(where: str, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Splits two conversations or texts into their common prefix, which is the prompt, and the answers, like TRL."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, (list, str)):
        raise bad_row(
            where, "has no prompt; without one, chosen and rejected must both be strings or both be lists of messages"
        )
    pairs = zip(chosen, rejected, strict=False)
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # because a space belongs to the token of the next word
    if not same:
        raise bad_row(where, "has no prompt, because chosen and rejected have no common beginning")
    return chosen[:same], chosen[same:], rejected[same:]


def _rated_conversation(where: str, values: dict[Any, Any]) -> Conversation:
    column = "messages" if "messages" in values else "conversations"
    turns = tuple(read_turns(where, _as_turns(_with_system(values, values[column])), column))
    if turns and turns[-1]["role"] != "assistant":
        raise bad_row(where, "ends without an answer to rate")
    return Conversation(where, check_turns(where, turns, len(turns) - 1), len(turns) - 1)


def _label(where: str, value: Any) -> bool:
    label = LABELS.get(value.strip().lower() if isinstance(value, str) else value) if _is_scalar(value) else None
    if label is None:
        raise bad_row(where, f"has the label {value!r} instead of true or false")
    return label


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (str, bool, int, float))


def _conversation(where: str, prompt: Any, answer: Any, column: str) -> Conversation:
    """Builds a conversation from a prompt (text or list of turns) and an answer (text, turn or list of turns)."""
    plain = (prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else None
    for name, text in (("prompt", prompt), (column, answer)):
        if isinstance(text, str) and not text.strip():
            raise bad_row(where, f"has an empty {name}")
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _as_turns(prompt)
    answered = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _as_turns(answer)
    before = tuple(read_turns(where, asked, "prompt"))
    turns = (*before, *read_turns(where, answered, column, len(before)))
    return Conversation(where, check_turns(where, turns, len(before)), len(before), plain)


def _as_turns(value: Any) -> Any:
    """Converts turns from ShareGPT's keys, `from` and `value`, to transformers'. Returns other values unchanged."""
    if isinstance(value, dict):
        value = [value]
    return [_turn(turn) for turn in value] if isinstance(value, list) else value


def _turn(turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        return turn
    rest: Message = {name: part for name, part in turn.items() if name not in ("from", "value")}
    return {**rest, "role": _role(turn), "content": turn["value"]}


def _role(turn: Any) -> Any:
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return ROLES.get(role, role) if isinstance(role, str) else role


@dataclass(frozen=True)
class Answers:
    """The token ids of a prompt and of one or two answers to it."""

    prompt: np.ndarray  # (P,) int32
    ids: tuple[np.ndarray, ...]  # (L,) int32 each
    learned: tuple[np.ndarray, ...]  # (L,) bool each: target tokens; the last token always is one
    label: bool = True  # whether the first answer is good
    special_text: str | None = field(default=None, compare=False)  # a special token's text in a message, kept as text


@dataclass
class ReadingNotes:
    """Counts the rows of a source that were shortened or skipped."""

    shortened: int = 0  # rows whose oldest turns were removed
    dropped: int = 0  # rows that are too long, or have an answer without tokens to learn
    with_special_text: int = 0  # examples with the text of a special token, which stayed plain text
    special_text: str | None = None  # the first such text
    bad_rows: BadRows = field(default_factory=lambda: BadRows("fail"))

    def texts(self, name: str, max_length: int) -> Iterator[str]:
        """Yields messages for the user about the source `name`."""
        if self.shortened:
            yield (
                f"{name}: {self.shortened} rows are longer than {max_length} tokens, so the oldest turns of their "
                "prompts were removed."
            )
        if self.dropped:
            yield (
                f"{name}: {self.dropped} rows were skipped, because they are longer than {max_length} tokens or have "
                "nothing to learn; raise data.max_length (with eval: --window) to keep the long ones."
            )
        yield from special_text_notes(name, self.with_special_text, self.special_text)
        yield from (f"{name}: {note}" for note in self.bad_rows.notes())


def tokenize_preferences(
    rows: Iterable[SourceRow],
    tokenizer: Any,
    max_length: int,
    long_rows: Literal["truncate", "drop"],
    rated: bool,
    notes: ReadingNotes,
    parse_special: bool = False,
) -> list[Answers]:
    """Tokenizes rows in order, which must all have the same form. If `rated`, each answer becomes a separate example.

    Raises BadRowError for an invalid row, and ConfigError if rows have single answers, but pairs are needed.
    """
    first: PreferenceRow | None = None

    def fit(row: SourceRow) -> list[tuple[Answers | None, bool]]:
        nonlocal first
        read = read_preference(row)
        parsed = tuple(replace(one, parse_special=parse_special) for one in read.conversations)
        read = replace(read, conversations=parsed)
        if read.label is not None and not rated:
            raise ConfigError(
                f"{read.where} has a rated answer, but this loss needs a chosen and a rejected answer; set "
                "training.preference.loss to kto, or use rows with chosen and rejected."
            )
        first = first or read
        if (read.label is None) != (first.label is None):
            forms = ("a rated answer", "a chosen and a rejected answer")
            raise bad_row(
                read.where, f"has {forms[read.label is None]}, but the rows before it have {forms[first.label is None]}"
            )
        with tokenizer_errors(read.where):
            if rated:
                found = [(*_tokenized([one], tokenizer, max_length, long_rows), good) for one, good in read.rated]
                return [(answers and replace(answers, label=good), is_short) for answers, is_short, good in found]
            return [_tokenized(read.conversations, tokenizer, max_length, long_rows)]

    examples = []
    for fitted in notes.bad_rows.parsed(rows, fit):
        for answers, is_shortened in fitted:
            notes.shortened += is_shortened
            notes.dropped += answers is None
            if answers is not None:
                examples.append(answers)
                notes.with_special_text += answers.special_text is not None
                notes.special_text = notes.special_text or answers.special_text
    return examples


def _tokenized(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int, long_rows: Literal["truncate", "drop"]
) -> tuple[Answers | None, bool]:
    """Tokenizes one or two conversations with the same prompt; None if they are too long or have nothing to learn.

    With "truncate", as few of the prompt's oldest turns as possible are removed. Also returns whether any were.
    """

    def masked_from(question: int | None) -> list[MaskedConversation]:
        cut = conversations if question is None else [c.from_question(question) for c in conversations]
        return [mask_conversation(conversation, tokenizer) for conversation in cut]

    def fits(masked: Sequence[MaskedConversation]) -> bool:
        return max(len(one.ids) for one in masked) <= max_length

    masked, is_long = masked_from(None), False
    if not fits(masked):
        asked = [] if long_rows == "drop" else conversations[0].later_questions()
        questions = [number for number in asked if number < conversations[0].first]
        kept = bisect_left(questions, True, key=lambda question: fits(masked_from(question)))
        if kept == len(questions):
            return None, False
        masked, is_long = masked_from(questions[kept]), True
    answers = _split(masked)
    if len(masked) == 2 and masked[0].ids == masked[1].ids:
        raise bad_row(conversations[0].where, "has chosen and rejected answers with identical tokens")
    return answers, is_long and answers is not None


def _split(masked: Sequence[MaskedConversation]) -> Answers | None:
    """Splits conversations into the common tokens before the answers, and the answers."""
    if not all(any(one.learned[1:]) for one in masked):
        return None
    starts = [max(1, one.learned.index(True)) for one in masked]
    ids = [np.array(one.ids, np.int32) for one in masked]
    same = min(len(one) for one in ids)
    if len(ids) == 2:
        differs = np.flatnonzero(ids[0][:same] != ids[1][:same])
        same = int(differs[0]) if len(differs) else same
    length = min(*starts, same) if len(starts) > 1 else starts[0]
    if not length:
        return None
    learned = [np.array(one.learned[length:], np.bool_) for one in masked]
    stops = [int(np.flatnonzero(known)[-1]) + 1 if known.any() else 0 for known in learned]
    if not all(stops):
        return None
    answers = zip(ids, learned, stops, strict=True)
    parts = [(one[length : length + stop], known[:stop]) for one, known, stop in answers]
    special_text = next((one.special_text for one in masked if one.special_text is not None), None)
    answered, targets = tuple(one for one, _ in parts), tuple(known for _, known in parts)
    return Answers(ids[0][:length], answered, targets, special_text=special_text)

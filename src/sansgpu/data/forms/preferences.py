"""Preferences: prompts with a chosen and a rejected answer, or with one rated answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sansgpu.data.forms.answer_scores import remark_on_scores
from sansgpu.data.forms.chats import (
    Conversation,
    all_turns,
    build_conversation,
    prompt_and_answer,
    require_nonempty,
    role_of,
)
from sansgpu.data.forms.form import Form, Forms
from sansgpu.data.rows import Row, SourceRow, TypedRow, bad_row
from sansgpu.data.tables import Columns

# The keys True and False also match the numbers 1 and 0.
RATINGS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class PreferenceRow(TypedRow):
    """A row: the chosen and the rejected conversation, with the same prompt, or one conversation with its rating."""

    conversations: tuple[Conversation, ...]
    label: bool | None = None  # rating of a single answer: True for good; None for pairs
    remark: str | None = None  # about the scores of the answers

    @property
    def rated(self) -> list[tuple[Conversation, bool]]:
        """Returns each conversation with its rating."""
        if self.label is not None:
            return [(self.conversations[0], self.label)]
        return list(zip(self.conversations, (True, False), strict=True))


def _prompt_and_answer(row: SourceRow, prompt: Any, answer: Any, column: str) -> Conversation:
    require_nonempty(row.where, prompt, "prompt")
    return prompt_and_answer(row, prompt, answer, column)


def _pair(row: SourceRow, prompt: Any, chosen: Any, rejected: Any) -> PreferenceRow:
    answers = ("chosen", chosen), ("rejected", rejected)
    found = tuple(_prompt_and_answer(row, prompt, answer, name) for name, answer in answers)
    return PreferenceRow(row.where, found, remark=remark_on_scores(row))


def _two_answers(row: SourceRow) -> tuple[Any, Any]:
    if row.value["chosen"] == row.value["rejected"]:
        raise bad_row(row.where, "has identical chosen and rejected answers")
    return row.value["chosen"], row.value["rejected"]


def _pair_with_prompt_in(column: str) -> Callable[[SourceRow, Columns], PreferenceRow]:
    return lambda row, columns: _pair(row, row.value[column], *_two_answers(row))


def _has_prompt(row: Row, columns: Columns) -> bool:
    """Returns whether a row has a prompt, and the chosen turns do not include it, as in ultrafeedback_binarized."""
    if any(row.get(key) is None for key in ("prompt", "chosen", "rejected")):
        return False
    chosen = row["chosen"]
    return not (isinstance(chosen, list) and chosen and role_of(chosen[0]) in ("system", "developer", "user"))


def _whole_pair(row: SourceRow, columns: Columns) -> PreferenceRow:
    """Splits two conversations or texts into their common prefix, which is the prompt, and the answers, like TRL."""
    chosen, rejected = _two_answers(row)
    if type(chosen) is not type(rejected) or not isinstance(chosen, (list, str)):
        raise bad_row(
            row.where,
            "has no prompt; without one, chosen and rejected must both be strings or both be lists of messages",
        )
    pairs = zip(chosen, rejected, strict=False)
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    if same == min(len(chosen), len(rejected)):
        shorter, longer = ("chosen", "rejected") if len(chosen) < len(rejected) else ("rejected", "chosen")
        raise bad_row(
            row.where,
            f"has no prompt, and {longer} begins with all of {shorter}, so it is unclear where the prompt ends; put it "
            "into a column prompt, and only the answers into chosen and rejected",
        )
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # because a space belongs to the token of the next word
    if not same:
        raise bad_row(row.where, "has no prompt, because chosen and rejected have no common beginning")
    return _pair(row, chosen[:same], chosen[same:], rejected[same:])


def _rating(row: SourceRow) -> bool:
    value = row.value["label"]
    key = value.strip().lower() if isinstance(value, str) else value
    label = RATINGS.get(key) if isinstance(key, (str, bool, int, float)) else None
    if label is None:
        raise bad_row(row.where, f"has the label {value!r} instead of true or false")
    return label


def _rated_conversation_in(column: str) -> Callable[[SourceRow, Columns], PreferenceRow]:
    def read(row: SourceRow, columns: Columns) -> PreferenceRow:
        turns = all_turns(row, row.value[column], column)
        if turns and turns[-1]["role"] != "assistant":
            raise bad_row(row.where, "ends without an answer to rate")
        return PreferenceRow(row.where, (build_conversation(row, turns, len(turns) - 1),), _rating(row))

    return read


def _rated_completion(row: SourceRow, columns: Columns) -> PreferenceRow:
    answer = _prompt_and_answer(row, row.value["prompt"], row.value["completion"], "completion")
    return PreferenceRow(row.where, (answer,), _rating(row))


_PROMPT, _GOOD, _BAD = "What is 2 + 2?", {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
_ASKED = [{"role": "user", "content": _PROMPT}]
_HUMAN, _GPT = {"from": "human", "value": _PROMPT}, {"from": "gpt", "value": "4"}

PREFERENCES = Forms(
    "prompt, chosen and rejected; chosen and rejected; conversations, chosen and rejected; messages and label; or "
    "prompt, completion and label", (
    Form(("conversations", "chosen", "rejected"), _pair_with_prompt_in("conversations"),
         {"conversations": [_HUMAN], "chosen": _GPT, "rejected": {"from": "gpt", "value": "5"}}, ("system",)),
    Form(("prompt", "chosen", "rejected"), _pair_with_prompt_in("prompt"),
         {"prompt": _PROMPT, "chosen": "4", "rejected": "5"}, ("system",), _has_prompt),
    Form(("chosen", "rejected"), _whole_pair,
         {"chosen": [*_ASKED, _GOOD], "rejected": [*_ASKED, _BAD]}, ("prompt", "system")),
    Form(("messages", "label"), _rated_conversation_in("messages"),
         {"messages": [*_ASKED, _BAD], "label": False}, ("system",)),
    Form(("conversations", "label"), _rated_conversation_in("conversations"),
         {"system": "Answer briefly.", "conversations": [_HUMAN, _GPT], "label": True}, ("system",)),
    Form(("prompt", "completion", "label"), _rated_completion,
         {"prompt": _PROMPT, "completion": "4", "label": True}, ("system",)),
))  # fmt: skip

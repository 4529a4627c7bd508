"""Tokenizes preferences: prompts with a chosen and a rejected answer, or with one rated answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.data.forms.chats import Conversation, ConversationOptions
from sansgpu.data.forms.preferences import PREFERENCES, PreferenceRow
from sansgpu.data.rows import SourceRow, bad_row
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.tasks.sft.chat import DEFAULTS, MaskedConversation, mask_conversation
from sansgpu.tasks.sft.notes import ReadingNotes


@dataclass(frozen=True)
class Answers:
    """The token ids of a prompt and of one or two answers to it."""

    prompt: np.ndarray  # (P,) int32
    ids: tuple[np.ndarray, ...]  # (L,) int32 each
    learned: tuple[np.ndarray, ...]  # (L,) bool each: target tokens; the last token always is one
    label: bool = True  # whether the first answer is good
    special_text: str | None = field(default=None, compare=False)  # a special token's text in a message, kept as text
    lacks_system: bool = field(default=False, compare=False)  # the chat template omitted the system message
    omitted: tuple[str, ...] = field(default=(), compare=False)  # names of other parts that it omitted
    lost_thoughts: int = field(default=0, compare=False)  # turns whose thoughts it omitted


def tokenize_preferences(
    rows: Iterable[SourceRow],
    tokenizer: Any,
    max_length: int,
    long_rows: Literal["truncate", "drop"],
    rated: bool,
    notes: ReadingNotes,
    options: ConversationOptions = DEFAULTS,
) -> list[Answers]:
    """Tokenizes rows in order, which must all have the same form. If `rated`, each answer becomes a separate example.

    Raises BadRowError for an invalid row, and ConfigError if rows have single answers, but pairs are needed.
    """
    first: PreferenceRow | None = None

    def fit(row: SourceRow) -> list[tuple[Answers | None, bool]]:
        nonlocal first
        read = PREFERENCES.read(row, options.columns, notes.bad_rows)
        read = replace(read, conversations=tuple(map(options.applied, read.conversations)))
        if read.remark is not None:
            notes.bad_rows.remark(read.remark)
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
                notes.count(answers.special_text, answers.lacks_system, answers.omitted)
                notes.count_thoughts(answers.lost_thoughts)
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
    found = Answers(ids[0][:length], answered, targets, special_text=special_text)
    omitted = tuple(dict.fromkeys(name for one in masked for name in one.omitted))
    lost_thoughts = max(one.lost_thoughts for one in masked)
    return replace(found, lacks_system=masked[0].lacks_system, omitted=omitted, lost_thoughts=lost_thoughts)

"""Preferences: prompts with a chosen and a rejected answer, or with one rated answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sansgpu.config.wording import shown
from sansgpu.data.forms.answer_scores import remark_on_scores
from sansgpu.data.forms.cells import parsed_cell
from sansgpu.data.forms.chat_columns import (
    MEDIA_COLUMNS,
    after_system,
    all_turns,
    has_values,
    only_text,
    require_nonempty,
)
from sansgpu.data.forms.chats import (
    INSTRUCTION_COLUMNS,
    Conversation,
    build_conversation,
    chat_form,
    instruction_and_answer,
    prompt_and_answer,
)
from sansgpu.data.forms.form import Form, Forms, is_empty, is_missing
from sansgpu.data.forms.turns import Message, as_turns, chatml_turns, read_turns, role_of, turns_in_text
from sansgpu.data.rows import Row, SourceRow, TypedRow, bad_row
from sansgpu.data.tables import Columns

PROMPT_COLUMNS = "prompt", "input", "user_prompt"  # besides those of instructions
RATING_COLUMNS = "label", "kto_tag"  # the second as in LLaMA-Factory's rows
SCORE_KEYS = "overall_score", "fine-grained_score", "score", "rating"  # scores of completions, as in UltraFeedback
# The keys True and False also match the numbers 1 and 0.
RATINGS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
# Roles in the texts of Anthropic's HH.
_MARK = re.compile(r"(?:\A\s*|\n\r?\n)(Human|Assistant):")
_MARKED_ROLES = {"Human": "user", "Assistant": "assistant"}


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


def _prompt_and_answer(row: SourceRow, prompt: Any, answer: Any, column: str, columns: Columns) -> Conversation:
    require_nonempty(row.where, "" if is_empty(prompt) else prompt, "prompt")
    if not isinstance(prompt, (str, list, tuple, dict)):
        raise bad_row(row.where, f"has {shown(prompt)} as its prompt instead of a text or a list of turns")
    if not isinstance(prompt, str) or not isinstance(answer, str) or not (asked := _turns_at_marks(prompt)):
        return prompt_and_answer(row, prompt, answer, column, columns)
    found = prompt_and_answer(row, asked, answer.strip(), column, columns)
    is_whole = is_empty(row.value.get("history"))
    return replace(found, plain=(after_system(row, prompt, columns), answer)) if is_whole else found


def _turns_at_marks(prompt: str) -> list[Message]:
    """Returns the turns of a prompt with the marks of Anthropic's HH, "Human:" and "Assistant:", the last one for the
    answer. Text before the first mark is the system message. Other texts have no turns.
    """
    begin, *parts = _MARK.split(prompt)
    if parts[-2:-1] != ["Assistant"] or parts[-1].strip():
        return []
    turns = [{"role": _MARKED_ROLES[name], "content": text.strip()}
             for name, text in zip(parts[:-2:2], parts[1:-2:2], strict=True)]  # fmt: skip
    return [*([{"role": "system", "content": begin.strip()}] if begin.strip() else []), *turns]


def _pair(row: SourceRow, columns: Columns, prompt: Any, answers: tuple[Any, Any]) -> PreferenceRow:
    named = zip(("chosen", "rejected"), answers, strict=True)
    return _of_two(row, [_prompt_and_answer(row, prompt, answer, name, columns) for name, answer in named])


def _of_two(row: SourceRow, conversations: Sequence[Conversation]) -> PreferenceRow:
    return PreferenceRow(row.where, tuple(conversations), remark=remark_on_scores(row))


def _two_answers(row: SourceRow) -> tuple[Any, Any]:
    if row.value["chosen"] == row.value["rejected"]:
        raise bad_row(row.where, "has identical chosen and rejected answers")
    chosen, rejected = (turns_in_text(row.value[name]) for name in ("chosen", "rejected"))
    both = [chatml_turns(answer) if isinstance(answer, str) else [] for answer in (chosen, rejected)]
    return (both[0], both[1]) if all(both) else (chosen, rejected)


def _pair_with_prompt_in(column: str) -> Callable[[SourceRow, Columns], PreferenceRow]:
    def read(row: SourceRow, columns: Columns) -> PreferenceRow:
        prompt = turns_in_text(row.value[column])
        if column == "prompt":
            prompt = only_text(row, prompt, column, "prompt")
        return _pair(row, columns, prompt, _two_answers(row))

    return read


def _pair_with_instruction_in(column: str) -> Callable[[SourceRow, Columns], PreferenceRow]:
    def read(row: SourceRow, columns: Columns) -> PreferenceRow:
        require_nonempty(row.where, row.value[column], column)
        answers = dict(zip(("chosen", "rejected"), _two_answers(row), strict=True))
        decoded_row = row._replace(value={**row.value, **answers})
        return _of_two(row, [instruction_and_answer(decoded_row, column, name, columns) for name in answers])

    return read


def _best_and_worst(row: SourceRow, columns: Columns) -> PreferenceRow:
    """Reads an instruction with several scored answers, of which the best and the worst are compared."""
    completions = parsed_cell(row.value["completions"])
    scored = [(score_of(one), one.get("response")) for one in completions if isinstance(one, dict)]
    ranked = sorted(((score, text) for score, text in scored if score is not None), key=lambda pair: pair[0])
    if len(ranked) < 2 or ranked[0][0] == ranked[-1][0]:
        raise bad_row(row.where, f"has no two completions with different scores ({', '.join(SCORE_KEYS)})")
    return _pair(row, columns, row.value["instruction"], (ranked[-1][1], ranked[0][1]))


def score_of(completion: Row) -> float | None:
    """Returns the score of a completion as a number, or None if it has none."""
    for key in SCORE_KEYS:
        try:
            score = float(completion.get(key))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        if math.isfinite(score):
            return score
    return None


def _are_scored(row: Row, columns: Columns) -> bool:
    completions = parsed_cell(row.get("completions"))
    are_objects = isinstance(completions, list) and any(isinstance(one, dict) for one in completions)
    return are_objects and isinstance(row.get("instruction"), str)


def _of_ranked(form: Form[PreferenceRow]) -> Form[PreferenceRow]:
    """Returns a form that also names the completions that are not compared."""
    return replace(form, unused=lambda row, columns: [
        *(form.unused(row, columns) if form.unused is not None else ()),
        *_unused_of_completions([one for one in parsed_cell(row["completions"]) if isinstance(one, dict)]),
    ])  # fmt: skip


def _unused_of_completions(completions: Sequence[Row]) -> Iterator[str]:
    if len(completions) > 2:
        yield "the completions between the best and the worst"
    keys = dict.fromkeys(key for one in completions for key, value in one.items() if not is_empty(value))
    yield from (f"{key} of a completion" for key in keys if key not in ("response", *SCORE_KEYS))


def _has_prompt_in(column: str) -> Callable[[Row, Columns], bool]:
    def has_prompt(row: Row, columns: Columns) -> bool:
        """Returns whether a row has a prompt, and chosen does not include it, as in ultrafeedback_binarized."""
        if not has_values((column, "chosen", "rejected"))(row, columns):
            return False
        chosen = turns_in_text(row["chosen"])
        chosen = chatml_turns(chosen) or chosen if isinstance(chosen, str) else chosen
        if isinstance(chosen, str):
            return not _is_marked(chosen)
        return not (isinstance(chosen, list) and chosen and role_of(chosen[0]) in ("system", "developer", "user"))

    return has_prompt


def _is_marked(text: str) -> bool:
    """Returns whether a text begins with a question, and has an answer, at the marks of Anthropic's HH."""
    names = _MARK.findall(text)
    return text.lstrip().startswith("Human:") and "Assistant" in names


def _whole_pair(row: SourceRow, columns: Columns) -> PreferenceRow:
    """Splits two conversations or texts into their common prefix, which is the prompt, and the answers, like TRL."""
    chosen, rejected = _two_answers(row)
    if type(chosen) is not type(rejected) or not isinstance(chosen, (list, str)):
        raise bad_row(
            row.where,
            "has no prompt; without one, chosen and rejected must both be strings or both be lists of messages",
        )
    if isinstance(chosen, str) and all("Assistant" in _MARK.findall(text) for text in (chosen, rejected)):
        return _pair_at_marks(row, columns, (chosen, rejected))
    pairs = zip(chosen, rejected, strict=False)
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    if same == min(len(chosen), len(rejected)):
        shorter, longer = ("chosen", "rejected") if len(chosen) < len(rejected) else ("rejected", "chosen")
        raise bad_row(
            row.where,
            f"has no prompt, and {longer} begins with all of {shorter}, so it is unclear where the prompt ends; put it "
            "into a column prompt, and only the answers into chosen and rejected",
        )
    if isinstance(chosen, str):
        while same and all(text[same - 1 : same + 1].isalnum() and same < len(text) for text in (chosen, rejected)):
            same -= 1  # to the start of a word, of which each answer has a different end
        same -= same > 0 and chosen[same - 1] == " "  # because a space belongs to the token of the next word
        if not same:
            raise bad_row(row.where, f"has no prompt, because {_no_common_prompt(row)}")
    if not same:
        raise bad_row(row.where, "has no prompt, because chosen and rejected have no common beginning")
    if isinstance(chosen, list):
        _require_same_prompt(row, chosen[:same])
    return _pair(row, columns, chosen[:same], (chosen[same:], rejected[same:]))


def _require_same_prompt(row: SourceRow, turns: Sequence[Any]) -> None:
    """Raises BadRowError if the column `prompt` has something that the turns before the answers do not have."""
    prompt = only_text(row, turns_in_text(row.value.get("prompt")), "prompt", "prompt")
    if is_empty(prompt):
        return
    texts = [turn["content"].strip() for turn in read_turns(row.where, turns, "chosen")]
    if isinstance(prompt, str):  # a question, or all turns as one text
        is_same = prompt.strip() in texts or all(text in prompt for text in texts)
    else:
        asked = read_turns(row.where, as_turns(prompt, "user"), "prompt")
        is_same = all(turn["content"].strip() in texts for turn in asked)
    if not is_same:
        raise bad_row(row.where, "has a prompt that is not in the turns of chosen; leave it out or put it there")


def _no_common_prompt(row: SourceRow) -> str:
    """Says why two texts show no prompt, and what to do."""
    used = "chosen", "rejected", *PROMPT_COLUMNS, *INSTRUCTION_COLUMNS
    texts = (str(name) for name, value in row.value.items() if isinstance(value, str) and value.strip())
    others = [name for name in texts if name not in used]
    renamed = f", or rename the one that has it ({', '.join(others[:5])})" if others else ""
    return f"chosen and rejected have no common beginning; add a column prompt{renamed}"


def _pair_at_marks(row: SourceRow, columns: Columns, texts: tuple[str, str]) -> PreferenceRow:
    """Reads texts with the marks of Anthropic's HH, whose last turn is the answer."""
    ends = list[int]()
    for name, text in zip(("chosen", "rejected"), texts, strict=True):
        last = [*_MARK.finditer(text)][-1]
        if last[1] != "Assistant":
            raise bad_row(row.where, f"ends {name} with a turn of Human, without an answer of Assistant")
        require_nonempty(row.where, text[last.end() :], name)
        ends.append(last.end())
    prompt, other = (text[:end] for text, end in zip(texts, ends, strict=True))
    if prompt != other:
        raise bad_row(row.where, "has different turns before the last answers in chosen and in rejected")
    if not _turns_at_marks(prompt):
        raise bad_row(row.where, "has no prompt, because chosen and rejected begin with the answer")
    return _pair(row, columns, prompt, (texts[0][ends[0] :], texts[1][ends[1] :]))


def _rating(row: SourceRow) -> bool:
    value = next(row.value[column] for column in RATING_COLUMNS if not is_missing(row.value.get(column)))
    key = value.strip().lower() if isinstance(value, str) else value
    label = RATINGS.get(key) if isinstance(key, (str, bool, int, float)) else None
    if label is None:
        raise bad_row(row.where, f"has the label {value!r} instead of true or false")
    return label


def _rated_conversation_in(column: str) -> Callable[[SourceRow, Columns], PreferenceRow]:
    def read(row: SourceRow, columns: Columns) -> PreferenceRow:
        turns = all_turns(row, row.value[column], column, columns)
        if not turns or turns[-1]["role"] != "assistant":
            raise bad_row(row.where, "ends without an answer to rate")
        return PreferenceRow(row.where, (build_conversation(row, turns, len(turns) - 1, columns),), _rating(row))

    return read


def _rated_answer_in(asked: str, answer: str) -> Callable[[SourceRow, Columns], PreferenceRow]:
    def read(row: SourceRow, columns: Columns) -> PreferenceRow:
        if asked in INSTRUCTION_COLUMNS:
            found = instruction_and_answer(row, asked, answer, columns)
        else:
            prompt = only_text(row, row.value[asked], asked, "prompt")
            found = _prompt_and_answer(row, prompt, row.value[answer], answer, columns)
        return PreferenceRow(row.where, (found,), _rating(row))

    return read


_PROMPT, _GOOD, _BAD = "What is 2 + 2?", {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
_ASKED = [{"role": "user", "content": _PROMPT}]
_HUMAN, _GPT = {"from": "human", "value": _PROMPT}, {"from": "gpt", "value": "4"}
_RATED_PAIRS = ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("question", "answer")

PREFERENCES = Forms(
    "prompt, chosen and rejected; chosen and rejected; conversations, chosen and rejected; messages and label; or "
    "prompt, completion and label", (
    chat_form(("conversations", "chosen", "rejected"), _pair_with_prompt_in("conversations"),
              {"conversations": [_HUMAN], "chosen": _GPT, "rejected": {"from": "gpt", "value": "5"}}, ("history",)),
    chat_form(("prompt", "chosen", "rejected"), _pair_with_prompt_in("prompt"),
              {"prompt": _PROMPT, "chosen": "4", "rejected": "5"}, ("history",), _has_prompt_in("prompt")),
    *(chat_form((column, "chosen", "rejected"), _pair_with_instruction_in(column),
                {column: _PROMPT, "chosen": "4", "rejected": "5"}, ("history",), _has_prompt_in(column))
      for column in INSTRUCTION_COLUMNS),
    *(chat_form((column, "chosen", "rejected"), _pair_with_prompt_in(column),
                {column: _PROMPT, "chosen": "4", "rejected": "5"}, ("history",), _has_prompt_in(column))
      for column in PROMPT_COLUMNS[1:]),
    chat_form(("chosen", "rejected"), _whole_pair,
              {"chosen": [*_ASKED, _GOOD], "rejected": [*_ASKED, _BAD]}, ("prompt",)),
    _of_ranked(chat_form(
        ("instruction", "completions"), _best_and_worst,
        {"instruction": _PROMPT, "completions": [
            {"response": "4", "overall_score": 9}, {"response": "5", "overall_score": 2}]}, (), _are_scored)),
    *(chat_form((column, rating), _rated_conversation_in(column), {column: [*_ASKED, _BAD], rating: False})
      for rating in RATING_COLUMNS for column in ("messages", "conversations")),
    *(chat_form((*pair, rating), _rated_answer_in(*pair),
                {**dict(zip(pair, (_PROMPT, "4"), strict=True)), rating: True}, ("history",))
      for rating in RATING_COLUMNS for pair in _RATED_PAIRS),
), other_names=MEDIA_COLUMNS)  # fmt: skip

"""Finds how a model ends an answer: the tokens or the text that its chat template writes after one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sansgpu.machine.untrusted.templates import UnusableTemplateError, render_prefixes

_QUESTION, _ANSWER, _NEXT = "Qone", "Aone", "Qtwo"
_CONVERSATION = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
]
_OTHER_EOS = "<another end>"  # replaces the tokenizer's, to find out whether a template writes eos_token


@dataclass(frozen=True)
class TurnTexts:
    """The text that a chat template writes before the first question, after the last answer and after earlier ones."""

    before: str
    after_last: str
    after_earlier: str  # up to the next question; "" if the template refuses one
    uses_eos: bool  # the texts depend on the tokenizer's eos_token


@dataclass(frozen=True)
class AnswerEnd:
    """How a chat template ends an answer: with the token `token` or, if that is None, with the text `text`.

    Unless `is_learned`, the template writes nothing after the last answer, and the next question ends an earlier one.
    """

    token: int | None
    text: str
    is_learned: bool
    uses_eos: bool


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end a text. `eos` is written to files that can name only one."""

    eos: int | None
    ids: tuple[int, ...]
    turn: int | None  # the token that ends an answer of the chat template, if it is a single one


def turn_texts(tokenizer: Any) -> TurnTexts | None:
    """Returns the texts around turns; None without a chat template, or if it cannot render a short conversation."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    try:
        template = str(tokenizer.get_chat_template())
    except ValueError:  # several templates, but no default
        return None
    return _turn_texts(template, json.dumps(tokenizer.special_tokens_map))


@lru_cache(maxsize=16)
def _turn_texts(template: str, names: str) -> TurnTexts | None:
    named: dict[str, Any] = json.loads(names)
    found, other = _rendered(template, named), _rendered(template, {**named, "eos_token": _OTHER_EOS})
    if found is None:
        return None
    last, earlier = found
    before, _, _ = last.partition(_QUESTION)
    _, answer, after = last.rpartition(_ANSWER)
    between = earlier.rpartition(_ANSWER)[2].partition(_NEXT)
    return TurnTexts(before, after, between[0] if between[1] else "", found != other) if answer else None


def _rendered(template: str, names: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns a question with its answer, and the same with a second question; None if the template fails."""
    try:
        last, earlier = render_prefixes(template, names, _CONVERSATION, [(2, False), (3, False)])
    except UnusableTemplateError:
        return None
    return None if last.refusal is not None else (last.text, earlier.text)


def added_tokens_in(tokenizer: Any, text: str) -> list[int]:
    """Returns the added tokens whose names occur in a text, in the order of their first occurrence."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    places = {index: text.find(token.content) for index, token in added.items() if token.content.strip()}
    longest_first = sorted(places, key=lambda index: (places[index], -len(added[index].content)))
    return [index for index in longest_first if places[index] >= 0]


def answer_end(tokenizer: Any) -> AnswerEnd | None:
    """Returns how a tokenizer's chat template ends an answer; None without a template or if it does not show."""
    found = turn_texts(tokenizer)
    if found is None:
        return None
    is_learned = bool(found.after_last.strip())
    after = found.after_last if is_learned else found.after_earlier
    token = next(iter(added_tokens_in(tokenizer, after)), None)
    return AnswerEnd(token, after.rstrip() if token is None else "", is_learned, found.uses_eos)


def stop_strings(tokenizer: Any) -> tuple[str, ...]:
    """Returns the text that ends an answer if it is not a token."""
    end = answer_end(tokenizer)
    return () if end is None or not end.text else (end.text,)


def token_ids(value: Any) -> list[int]:
    """Returns the ids in the `eos_token_id` of a configuration, which may be None, an id or a list."""
    return [index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int)]


def end_tokens(tokenizer: Any, known: Iterable[int] = ()) -> EndTokens:
    """Returns the tokens that end a text: the tokenizer's, the `known` ones of the model, and the chat template's.

    If the template's is a new one, it becomes `eos`, unless that would change what the template writes.
    """
    eos: int | None = tokenizer.eos_token_id
    ids = list(dict.fromkeys(index for index in (eos, *known) if index is not None))
    end = answer_end(tokenizer)
    turn = None if end is None else end.token
    if end is not None and turn is not None and turn not in ids:
        eos = eos if end.uses_eos else turn
        ids = [*ids, turn] if end.uses_eos else [turn, *ids]
    return EndTokens(eos, tuple(ids), turn)

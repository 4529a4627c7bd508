"""Finds out how a chat template writes the tool calls of an answer, and reads such calls from generated text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.machine.untrusted.templates import UnusableTemplateError, render_prefixes, with_tools

MAX_CLOSINGS = 16  # texts that may end a call before the text is no call: a string in its JSON may contain some

_NAME, _KEY, _VALUE, _CONTENT = "trial_function", "trial_key", "trial value", "Atrial"
_QUESTION = {"role": "user", "content": "Qtrial"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Dtrial",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_ANSWERS = ({"content": _CONTENT}, {"content": "", "tool_calls": [_CALL]}, {"tool_calls": [_CALL]})


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by an answer."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallForm:
    """How a chat template writes calls: as JSON objects, or a list of them, between two texts.

    The texts lack special tokens, because generated text does. Without an `opening`, calls are the whole answer.
    """

    opening: str
    closing: str
    name_key: str
    arguments_key: str
    is_list: bool

    def calls_in(self, value: Any) -> list[ToolCall] | None:
        """Returns the calls that a JSON value stands for; None if it is something else."""
        if isinstance(value, list) != self.is_list:
            return None
        found = [self._call_of(one) for one in (value if isinstance(value, list) else [value])]
        calls = [call for call in found if call is not None]
        return calls if calls and len(calls) == len(found) else None

    def _call_of(self, value: Any) -> ToolCall | None:
        match value:
            case {self.name_key: str(name), self.arguments_key: dict(arguments)} if name:
                return ToolCall(name, arguments)
        return None


@dataclass(frozen=True)
class ToolUse:
    """What a chat template does with tools."""

    shows_tools: bool
    shows_calls: bool
    form: CallForm | None  # None: the form in which the model calls them is unknown


def tool_use(tokenizer: Any) -> ToolUse:
    """Finds out what a tokenizer's chat template does with tools by rendering a call.

    Raises ConfigError if the template cannot be rendered.
    """
    try:
        template = str(tokenizer.get_chat_template(tools=[_TOOL]))
    except ValueError as error:  # several templates, but no default
        raise ConfigError(f"{first_line(error)}; choose a different chat template.") from None
    try:
        trial = _trial(template, json.dumps(tokenizer.special_tokens_map))
    except UnusableTemplateError as error:
        raise ConfigError(f"{error}; choose a different chat template.") from None
    form = None if trial.call is None else _form_of(trial.call, tokenizer)
    return ToolUse(trial.shows_tools, trial.shows_calls, form)


class _TrialCall(NamedTuple):
    """What a chat template writes for a tool and for a call of it, if it can be told from the rest of the answer."""

    shows_tools: bool
    shows_calls: bool
    call: str | None


@lru_cache(maxsize=16)
def _trial(template: str, names: str) -> _TrialCall:
    named: dict[str, Any] = json.loads(names)
    plain = render_prefixes(template, named, [_QUESTION], [(1, True)])[0]
    offered = with_tools(named, [_TOOL])
    asked = render_prefixes(template, offered, [_QUESTION], [(1, True)])[0]
    shows_tools = asked.refusal is None and _NAME in asked.text and asked.text != plain.text
    answer, *callings = (
        render_prefixes(template, offered, [_QUESTION, {"role": "assistant", **answer}], [(2, False)])[0].text
        for answer in _ANSWERS
    )
    before, found, after = answer.rpartition(_CONTENT)
    shows_calls = any(text.count(_NAME) > answer.count(_NAME) for text in callings)
    for text in callings:
        for start in (before, asked.text):
            if found and text.startswith(start) and _NAME in text[len(start) :]:
                return _TrialCall(shows_tools, shows_calls, text[len(start) :].removesuffix(after))
    return _TrialCall(shows_tools, shows_calls, None)


def _form_of(written: str, tokenizer: Any) -> CallForm | None:
    """Infers the form from the text of the trial call."""
    place = written.find(_NAME)
    for start in (n for n, character in enumerate(written[:place]) if character in "[{"):
        try:
            value, end = json.JSONDecoder().raw_decode(written, start)
        except ValueError:
            continue
        keys = _keys_of(value[0] if isinstance(value, list) and len(value) == 1 else value)
        if keys is not None:
            opening, closing = (_without_special(part, tokenizer) for part in (written[:start], written[end:]))
            return CallForm(opening, closing, *keys, is_list=isinstance(value, list))
    return None


def _keys_of(value: Any) -> tuple[str, str] | None:
    """Returns the keys of the name and of the arguments in the trial call; None if it is something else."""
    if not isinstance(value, dict):
        return None
    name = next((key for key, part in value.items() if part == _NAME), None)
    arguments = next((key for key, part in value.items() if part == {_KEY: _VALUE}), None)
    return None if name is None or arguments is None else (name, arguments)


def _without_special(text: str, tokenizer: Any) -> str:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


class ToolCallReader:
    """Divides an answer, which arrives in pieces, into text and calls.

    The result does not depend on how the text is divided into pieces. Text that may belong to a call is held back, and
    returned as text if it turns out to be none. White space around calls is dropped.
    """

    def __init__(self, form: CallForm, names: Collection[str], at_most: int | None = None) -> None:
        """`names` are the functions that can be called, and `at_most` is the maximum number of calls to return."""
        self._form, self._names, self._room = form, names, at_most
        self._held = ""
        self._follows_call = self._is_text = False
        self.has_calls = False

    def add(self, piece: str) -> Iterator[str | ToolCall]:
        """Yields the text that is certain not to belong to a call, and the calls that are complete."""
        self._held += piece
        if self._form.opening:
            yield from self._marked(is_end=False)
            yield from self._text(self._certain())
            return
        start = self._held.lstrip()[:1]  # without an opening, the whole answer consists of calls or of text
        self._is_text = self._is_text or start not in ("", "[" if self._form.is_list else "{")
        if self._is_text:
            yield from self._text(len(self._held))

    def end(self) -> Iterator[str | ToolCall]:
        """Yields the rest once the text has ended."""
        if self._form.opening:
            yield from self._marked(is_end=True)
        elif not self._is_text:
            calls = self._calls(self._held.strip().removesuffix(self._form.closing))
            if calls is not None and all(call.name in self._names for call in calls):
                self._held = ""
                yield from self._counted(calls)
        yield from self._text(len(self._held))

    def _marked(self, is_end: bool) -> Iterator[str | ToolCall]:
        """Yields the complete calls in the held text, and the text before them."""
        opening = self._form.opening
        while (start := self._held.find(opening)) >= 0:
            found = self._calls_from(start + len(opening), is_end)
            if found is None:
                return
            calls, end = found
            if not calls:
                yield from self._text(start + len(opening))
                continue
            yield from self._text(len(self._held[:start].rstrip()), end)
            self._follows_call = True
            yield from self._counted(calls)

    def _calls_from(self, start: int, is_end: bool) -> tuple[list[ToolCall], int] | None:
        """Returns the calls after an opening and where they end; no calls if it is text; None if it is incomplete."""
        closing, stop = self._form.closing, start
        for _ in range(MAX_CLOSINGS if closing else 0):
            stop = self._held.find(closing, stop)
            if stop < 0:
                break
            if calls := self._calls(self._held[start:stop]):
                return calls, stop + len(closing)
            stop += len(closing)
        else:
            if closing:
                return [], start
        if not is_end:
            return None
        return self._calls(self._held[start:]) or [], len(self._held)

    def _certain(self) -> int:
        """Returns the length of the held text before what may be the beginning of a call."""
        opening = self._form.opening
        start = self._held.find(opening)
        if start < 0:
            lengths = range(min(len(opening) - 1, len(self._held)), 0, -1)
            begun = next((length for length in lengths if self._held.endswith(opening[:length])), 0)
            start = len(self._held) - begun
        return len(self._held[:start].rstrip())

    def _text(self, stop: int, end: int | None = None) -> Iterator[str]:
        """Yields the held text up to `stop`, if any, and drops it up to `end`."""
        text = self._held[:stop]
        if self._follows_call:
            text = text.lstrip()
        self._held = self._held[stop if end is None else end :]
        if text:
            self._follows_call = False
            yield text

    def _counted(self, calls: list[ToolCall]) -> Iterator[ToolCall]:
        self.has_calls = True
        if self._room is not None:
            calls = calls[: self._room]
            self._room -= len(calls)
        yield from calls

    def _calls(self, text: str) -> list[ToolCall] | None:
        """Returns the calls of which a text consists; None if it is something else."""
        calls, text = list[ToolCall](), text.strip()
        while text:
            try:
                value, end = _DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            found = self._form.calls_in(value)
            if found is None:
                return None
            calls += found
            text = text[end:].lstrip(" \t\r\n;")
        return calls or None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)  # models write line breaks in strings

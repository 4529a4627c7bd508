"""Finds out what a chat template does with tools and calls, and adapts calls to what it expects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.machine.untrusted.templates import UnusableTemplateError, render_prefixes, with_tools
from sansgpu.models.generation.call_form import CallForm, infer_form, with_marks
from sansgpu.models.generation.calls import Schemas, ToolCall

Message = Mapping[str, Any]

_KNOWN = ToolCall("trial_function", {"trial_key": "trial value", "trial_other": "other value"})
_CONTENT = "Atrial"
_QUESTION = {"role": "user", "content": "Qtrial"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _KNOWN.name,
        "description": "Dtrial",
        "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in _KNOWN.arguments}},
    },
}
_NAMED_ID = re.compile(r"functions\.(.+):(\d+)")


class CallNeeds(NamedTuple):
    """What a chat template expects of the calls in a conversation."""

    text_arguments: bool = False  # arguments as JSON text, as of DeepSeek-V3's template
    named_ids: bool = False  # ids with the name, as of Kimi K2's template, which writes no other name

    def adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Returns messages with their calls, and the ids of the results, as the template expects them."""
        ids, count = dict[Any, str](), 0
        found = list[dict[str, Any]]()
        for message in messages:
            changed, calls = dict(message), message.get("tool_calls")
            if isinstance(calls, list) and calls and all(map(_is_call, calls)):
                changed["tool_calls"] = [self._call(call, count + n) for n, call in enumerate(calls)]
                count += len(calls)
                ids |= {
                    old.get("id"): new["id"]
                    for old, new in zip(calls, changed["tool_calls"], strict=True)
                    if "id" in new
                }
            if self.named_ids and (new_id := ids.get(message.get("tool_call_id"))) is not None:
                changed["tool_call_id"] = new_id
            found.append(changed)
        return found

    def _call(self, call: Message, number: int) -> dict[str, Any]:
        function, changed = dict(call["function"]), dict(call)
        if self.text_arguments and isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if self.named_ids:
            known = _NAMED_ID.fullmatch(str(call.get("id")))
            changed["id"] = f"functions.{function['name']}:{number if known is None else known[2]}"
        return {**changed, "function": function}


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict) and "name" in call["function"]


@dataclass(frozen=True)
class ToolUse:
    """What a chat template does with tools."""

    shows_tools: bool
    shows_calls: bool
    form: CallForm | None  # None: the form in which the model calls them is unknown


def tool_use(tokenizer: Any) -> ToolUse:
    """Finds out what a tokenizer's chat template does with tools by rendering calls.

    Raises ConfigError if the template cannot be rendered.
    """
    try:
        template = str(tokenizer.get_chat_template(tools=[_TOOL]))
    except ValueError as error:  # several templates, but no default
        raise ConfigError(f"{first_line(error)}; choose a different chat template.") from None
    try:
        trial = _trial(template, _special_names(tokenizer.special_tokens_map))
    except UnusableTemplateError as error:
        raise ConfigError(f"{error}; choose a different chat template.") from None
    form = None if trial.form is None else with_marks(trial.form, special_tokens(tokenizer).values())
    return ToolUse(trial.shows_tools, trial.shows_calls, form)


def schemas_of(tools: Iterable[Message]) -> Schemas:
    """Returns the schemas of the arguments of tools, by the names of their functions."""
    functions = (tool["function"] for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Returns the ids and texts of the tokens that decoding drops."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def adapted_to(template: str, names: Mapping[str, Any], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages with calls as a chat template expects them. `names` are its special tokens.

    Raises UnusableTemplateError if the template cannot be rendered.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [dict(message) for message in messages]
    return _trial(template, _special_names(names)).needs.adapted(messages)


def _special_names(names: Mapping[str, Any]) -> str:
    return json.dumps({name: text for name, text in names.items() if isinstance(text, str)})


class _TemplateTrial(NamedTuple):
    """What a chat template does with a tool and calls of it."""

    shows_tools: bool
    shows_calls: bool
    needs: CallNeeds
    form: CallForm | None


@lru_cache(maxsize=16)
def _trial(template: str, names: str) -> _TemplateTrial:
    writer = _TrialWriter(template, json.loads(names))
    shown = list[CallNeeds]()
    for needs in (CallNeeds(), CallNeeds(text_arguments=True), CallNeeds(named_ids=True), CallNeeds(True, True)):
        for shape in ({"content": ""}, {}):
            texts = [writer.answer({**shape, "tool_calls": calls}, needs) for calls in _calls()]
            if not writer.shows_name(texts[0]) or repr(_KNOWN.arguments) in texts[0]:
                continue
            shown.append(needs)
            one, two, empty = (writer.call_in(text) for text in texts)
            form = None if one is None else infer_form(one, two, empty, _KNOWN)
            if form is not None:
                return _TemplateTrial(writer.shows_tools, True, needs, form)
    return _TemplateTrial(writer.shows_tools, bool(shown), shown[0] if shown else CallNeeds(), None)


def _calls() -> Iterator[list[dict[str, Any]]]:
    """Yields one call, two calls, and a call without arguments."""
    one = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _KNOWN.name, "arguments": _KNOWN.arguments}}
    yield [one]
    yield [one, {**one, "id": "f5g6h7i8j"}]
    yield [{**one, "function": {"name": _KNOWN.name, "arguments": {}}}]


class _TrialWriter:
    """Writes answers to a trial question with a chat template."""

    def __init__(self, template: str, names: Mapping[str, Any]) -> None:
        self._template, self._names = template, with_tools(names, [_TOOL])
        self._end = str(names.get("eos_token") or "")
        plain = render_prefixes(template, names, [_QUESTION], [(1, True)])[0]
        asked = render_prefixes(template, self._names, [_QUESTION], [(1, True)])[0]
        self.shows_tools = asked.refusal is None and _KNOWN.name in asked.text and asked.text != plain.text
        self._content = self.answer({"content": _CONTENT}, CallNeeds())
        before, found, self._after = self._content.rpartition(_CONTENT)
        self._starts = (before.rstrip(), asked.text.rstrip()) if found else ()

    def answer(self, answer: Message, needs: CallNeeds) -> str:
        """Returns the text of a conversation with an answer; it is empty if the template refuses the answer."""
        turns = needs.adapted([_QUESTION, {"role": "assistant", **answer}])
        return render_prefixes(self._template, self._names, turns, [(2, False)])[0].text

    def shows_name(self, text: str) -> bool:
        return text.count(_KNOWN.name) > self._content.count(_KNOWN.name)

    def call_in(self, text: str) -> str | None:
        """Returns the part of the text of an answer that is its call; None if it cannot be told from the rest."""
        for start in self._starts:
            if text.startswith(start) and _KNOWN.name in text[len(start) :]:
                call = text[len(start) :].removesuffix(self._after)
                return call.partition(self._end)[0] if self._end else call
        return None

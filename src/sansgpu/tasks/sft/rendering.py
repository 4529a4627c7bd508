"""Renders conversations with chat templates, and finds what the model has to generate in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.data.forms.chat_columns import Tools
from sansgpu.data.forms.chats import Conversation
from sansgpu.data.forms.turns import Message, order_problem
from sansgpu.data.rows import BadRowError, bad_row
from sansgpu.machine.untrusted.templates import (
    Rendered,
    UnusableTemplateError,
    render_prefixes,
    render_spans,
    with_tools,
)
from sansgpu.models.generation.omitted import omitted_parts
from sansgpu.models.generation.thoughts import THOUGHT_END, THOUGHT_KEYS, lost_thoughts
from sansgpu.models.generation.tool_calls import adapted_to

Span = tuple[int, int]  # characters [start, stop) of a rendered conversation

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write today's date, but a run that is resumed tomorrow must get the same tokens. So the date is always
# the default of Llama 3's templates. A macro formats it, because no functions can be passed to a template.
_CODES = "".join(f" | replace('%{code}', '{date(2024, 7, 26).strftime('%' + code)}')" for code in "aAbBdHIjmMpSyY")
FIXED_DATE = f"{{% macro strftime_now(format) %}}{{{{ format{_CODES} }}}}{{% endmacro %}}\n"
MAX_PREFIX_CHARACTERS = 1 << 22  # maximum total length of the prefixes that are rendered in one call


def with_fixed_date(template: str) -> str:
    """Returns a chat template that writes the date of FIXED_DATE instead of today's."""
    return FIXED_DATE + template if "strftime_now" in template else template


class RenderedConversation:
    """A conversation rendered by its chat template."""

    def __init__(self, conversation: Conversation, tokenizer: Any) -> None:
        self._where, self._turns, self._first = conversation.where, conversation.turns, conversation.first
        self._learned_turns, self._tools = conversation.learned_turns, conversation.tools
        try:
            template = str(tokenizer.get_chat_template(tools=[*self._tools] or None))
        except ValueError as error:  # several templates, but no default
            raise ConfigError(f"{first_line(error)}; set data.chat_template to a Jinja file.") from None
        self._template = with_fixed_date(template)
        self._names = tokenizer.special_tokens_map
        self._prefixes: dict[tuple[int, bool], Rendered] = {}  # by number of turns, and whether a header follows
        self._render_needed_prefixes()
        self.full = self._prefix(len(self._turns))
        self._require_calls()
        known = self.full + "".join(turn["content"] for turn in self._turns)
        unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in known)  # private use area
        self._start_mark, self._end_mark = next(unused), next(unused)

    def spans(self, stops: np.ndarray) -> list[Span]:
        """Returns the spans to learn, given the end characters of tokens. Raises BadRowError if they are ambiguous."""
        if GENERATION.search(self._template):
            return self._generation_spans()
        return [self._span(number, stops) for number in self._learned_turns]

    def lacks_system(self) -> bool:
        """Returns whether the template omits the system message, as Mistral's does after the last question."""
        return any(turn["role"] == "system" and turn["content"].strip() not in self.full for turn in self._turns)

    def lost_thoughts(self) -> int:
        """Returns the number of turns whose thoughts the template leaves out, as Qwen3's does in earlier turns."""
        return lost_thoughts(self._turns, self.full, self.render)

    def _require_calls(self) -> None:
        """Raises BadRowError if the template ignores a tool call, because the model would learn an empty answer."""
        for number in self._learned_turns:
            if any(name not in self.full for name in _called(self._turns[number])):
                raise bad_row(self._where, f"calls a tool in turn {number + 1}, but the chat template omits tool calls")

    def _render_needed_prefixes(self) -> None:
        """Renders all prefixes that `_span` compares in one call, because each call takes a tenth of a millisecond."""
        count = len(self._turns)
        characters = sum(len(turn["content"]) for turn in self._turns)
        prefixes = [(count, False)]
        if not GENERATION.search(self._template) and count * characters < MAX_PREFIX_CHARACTERS:
            prefixes += [which for n in self._learned_turns for which in ((n, True), (n, False), (n + 1, False))]
        prefixes = list(dict.fromkeys(prefixes))
        rendered = self._render_all(self._turns, prefixes, self._tools)
        self._prefixes.update(zip(prefixes, rendered, strict=True))

    def _prefix(self, count: int, prompt: bool = False) -> str:
        """Returns the text of the first `count` turns and, if `prompt`, the header of the next answer."""
        if (count, prompt) not in self._prefixes:
            return self._require_text(self._render_all(self._turns[:count], [(count, prompt)], self._tools)[0])
        return self._require_text(self._prefixes[count, prompt])

    def _prefix_if_accepted(self, count: int, prompt: bool = False) -> str | None:
        """Returns a prefix, or None if the template rejects it, because it begins with an answer, for example."""
        try:
            return self._prefix(count, prompt)
        except BadRowError:
            return None

    def render(self, turns: Sequence[Message], tools: Tools | None = None) -> str:
        """Returns the text of other turns. Raises BadRowError if the template rejects them."""
        tools = self._tools if tools is None else tools
        return self._require_text(self._render_all(turns, [(len(turns), False)], tools)[0])

    def omitted(self) -> tuple[str, ...]:
        """Names the parts of the conversation that the template leaves out, except system messages."""
        return tuple(omitted_parts(self._turns, self._tools, self.render, skip=THOUGHT_KEYS))

    def _render_all(
        self, turns: Sequence[Message], prefixes: Sequence[tuple[int, bool]], tools: Tools
    ) -> list[Rendered]:
        try:
            turns = adapted_to(self._template, self._names, turns)
            return render_prefixes(self._template, with_tools(self._names, tools), turns, prefixes)
        except UnusableTemplateError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: UnusableTemplateError) -> ConfigError:
        return ConfigError(f"{self._where}: {error}; fix the template or set data.chat_template to a different one.")

    def _require_text(self, rendered: Rendered) -> str:
        if rendered.refusal is not None:
            order = order_problem(self._turns)
            remedy = "" if order is None else f": {order}; set data.merge_turns to true to merge such turns"
            raise bad_row(self._where, f"is rejected by the chat template ({rendered.refusal}){remedy}")
        return rendered.text

    def _generation_spans(self) -> list[Span]:
        """Returns the spans inside the template's {% generation %} blocks.

        transformers' `return_assistant_tokens_mask` uses the same blocks, but if one ends in white space without a
        token of its own, it includes all text after it.
        """
        try:
            turns = adapted_to(self._template, self._names, self._turns)
            marked = render_spans(self._template, with_tools(self._names, self._tools), turns)
        except UnusableTemplateError as error:
            raise self._unusable(error) from None
        self._require_text(marked)
        unlearned = [n for n, turn in enumerate(self._turns) if turn["role"] == "assistant"]
        left_out = [(0, self._length(self._first))]
        left_out += [(self._length(n), self._length(n + 1)) for n in unlearned if n not in self._learned_turns]
        return [span for span in marked.spans if not any(start <= span[0] < stop for start, stop in left_out)]

    def _length(self, count: int) -> int:
        """Returns the number of characters of the first `count` turns."""
        return _common_length(self._prefix(count), self.full) if count else 0

    def _span(self, number: int, stops: np.ndarray) -> Span:
        """Returns the span of an assistant turn by comparing prefixes of the text or, if that fails, by its content."""
        header = self._header(number)
        start = len(header) if header is not None and self.full.startswith(header) else None
        alone = (self._prefix_if_accepted(number + 1) or "").rstrip()
        if start is not None and self.full.startswith(alone) and start < len(alone):
            return start, len(alone)
        found = self._find_content(number, start, stops)
        if found is None or found[0] >= found[1]:
            raise bad_row(self._where, f"is rendered by the chat template without clear bounds of turn {number + 1}")
        return found

    def _header(self, number: int) -> str | None:
        """Returns the whole text up to the generated part of a turn; None if it cannot be determined."""
        header, plain = self._prefix_if_accepted(number, prompt=True), self._prefix_if_accepted(number)
        if header is None or header != plain:
            return header
        # The template ignores add_generation_prompt. A marker instead of the content shows where a header ends.
        probe = self.render([*self._turns[:number], {"role": "assistant", "content": self._start_mark}])
        written, mark, _ = probe.partition(self._start_mark)
        return written.rstrip(" ") if mark else None  # because a space belongs to the token of the next word

    def _find_content(self, number: int, start: int | None, stops: np.ndarray) -> Span | None:
        """Returns the span of a turn by rendering markers around its content; None if they change anything else.

        This works for templates that render a turn differently if more turns follow, as Qwen3's drops the thoughts. The
        turn is also rendered as the last one, and the text after its content, such as an end token, is part of the span
        if it is in the whole text, too.
        """
        start_mark = self._start_mark if start is None else ""
        marked = _marked(self._turns[number], start_mark, self._end_mark)
        if marked is None:
            return None
        with_marks = self.render([*self._turns[:number], marked, *self._turns[number + 1 :]])
        content, _, rest = with_marks.partition(self._end_mark)
        if content.replace(self._start_mark, "") + rest != self.full:
            return None
        if start is None:
            start = content.find(self._start_mark)
        stop = len(content.replace(self._start_mark, ""))
        _, mark, suffix = self._render_last(number, marked).partition(self._end_mark)
        if start < 0 or not mark:
            return None
        return start, self._suffix_end(stop, suffix, stops)

    def _render_last(self, number: int, turn: Message) -> str:
        """Returns the text up to `turn`, which replaces turn `number`, without the turns after it."""
        try:
            return self.render([*self._turns[:number], turn])
        except BadRowError:  # the template requires a question before the first answer, for example
            return self.render([{"role": "user", "content": "?"}, turn])

    def _suffix_end(self, stop: int, suffix: str, stops: np.ndarray) -> int:
        """Returns the end of a turn in the whole text, given the end of its content and the expected `suffix`."""
        if self.full.startswith(suffix.rstrip(), stop):
            return stop + len(suffix.rstrip())
        # Phi-3 ends only the last turn with an extra token, so keep the whole tokens of the common part.
        common = stop + _common_length(suffix, self.full[stop:])
        token_end = int(stops[stops <= common].max(initial=stop))
        return max(stop, len(self.full[:token_end].rstrip()))


def _common_length(one: str, other: str) -> int:
    """Returns the length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _called(turn: Message) -> Iterator[str]:
    """Yields the names of the tools that a turn calls, if any."""
    calls = turn.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"function": {"name": str(name)}} | {"name": str(name)}:
                yield name


def _marked(turn: Message, start_mark: str, end_mark: str) -> Message | None:
    """Returns a turn with markers around its content but inside surrounding white space, which templates may strip.

    `start_mark` is repeated after the thoughts, because some templates drop these. Without content, `end_mark` is
    appended to the name in the last tool call; returns None if there is no such name.
    """
    content = turn["content"]
    body = content.strip()
    if body:
        thoughts, ending, answer = body.rpartition(THOUGHT_END)
        if ending:
            body = f"{thoughts}{ending}{answer[: len(answer) - len(answer.lstrip())]}{start_mark}{answer.lstrip()}"
        before, after = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
        return {**turn, "content": f"{before}{start_mark}{body}{end_mark}{after}"}
    match turn.get("tool_calls"):
        case [*others, {"function": {"name": str(name), **rest}, **call}]:
            last = {**call, "function": {**rest, "name": name + end_mark}}
        case [*others, {"name": str(name), **call}]:
            last = {**call, "name": name + end_mark}
        case _:
            return None
    return {**turn, "tool_calls": [*others, last]}

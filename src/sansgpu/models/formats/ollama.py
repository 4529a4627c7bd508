"""Writes Modelfiles for Ollama, whose chat templates are programs in Go's template language.

Ollama cannot run a model's own Jinja template. The text that the Jinja template puts around the turns of a conversation
is inferred from rendered conversations, and checked with others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.wording import shown
from sansgpu.machine.untrusted.templates import UnusableTemplateError, render_prefixes
from sansgpu.models.formats.tokenizers import TokenizerParts

MAX_CONTEXT = 8192  # Ollama allocates the keys and values of the whole context when it loads a model
COMPLETION = "{{ .Prompt }}"  # template of models that only continue texts
Messages = Sequence[Mapping[str, str]]
Render = Callable[[Messages], str | None]  # returns None if the template rejects a conversation
_QUESTIONS, _ANSWERS, _SYSTEM = ("Qone", "Qtwo", "Qthree"), ("Aone", "Atwo"), "Sone"
_CHECKED = ("What is it?\n\nSay more.", "It is 1 < 2.", 'Why "so"?', "Because {{ x }}.", "And then?")


@dataclass(frozen=True)
class ChatFormat:
    """The text around the turns of a conversation: an optional system message, then questions and answers in turn."""

    start: str  # before the first question, without a system message
    answer: str  # between a question and its answer
    question: str  # between an answer and the next question
    prompt: str  # after the last question, which the model answers
    system: tuple[str, str] | None = None  # around the system message; None if the template has no place for one
    is_system_late: bool = False  # the system message is inside the last question instead of before the first

    @property
    def default_system(self) -> str | None:
        """The system message that the template adds to conversations without one; None if it adds none."""
        before, after = self.system or ("", "")
        fits = len(before + after) < len(self.start) and self.start.startswith(before) and self.start.endswith(after)
        if self.system is None or self.is_system_late or not fits:
            return None
        return self.start[len(before) : len(self.start) - len(after)]

    def without(self, bos: str) -> ChatFormat:
        """Removes a BOS token from the start of conversations."""
        before, after = self.system or ("", "")
        system = None if self.system is None else (before.removeprefix(bos), after)
        return replace(self, start=self.start.removeprefix(bos), system=system)

    def render(self, messages: Messages) -> str:
        """Returns what Ollama makes of a conversation with the Go template."""
        system = next((message["content"] for message in messages if message["role"] == "system"), None)
        turns = [message for message in messages if message["role"] != "system"]
        whole = "" if system is None or self.system is None else self.system[0] + system + self.system[1]
        text = whole if whole and not self.is_system_late else self.start
        for place, turn in enumerate(turns, 1):
            is_last = place == len(turns)
            if turn["role"] == "user":
                text += (whole if is_last and self.is_system_late else "") + turn["content"]
                text += self.prompt if is_last else self.answer
            else:
                text += turn["content"] + ("" if is_last else self.question)
        return text

    def go_template(self) -> str:
        """Returns the template that Ollama renders."""
        start, answer, question, prompt = map(_literal, (self.start, self.answer, self.question, self.prompt))
        late = ""
        if self.system is not None:
            before, after = map(_literal, self.system)
            if self.is_system_late:
                late = f"{{{{ if and $last $.System }}}}{before}{{{{ $.System }}}}{after}{{{{ end }}}}"
            else:
                start = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end }}}}"
        if answer != prompt:
            prompt = f"{{{{ if $last }}}}{prompt}{{{{ else }}}}{answer}{{{{ end }}}}"
        return (
            f"{start}{{{{ range $i, $_ := .Messages }}}}{{{{ $last := eq (len (slice $.Messages $i)) 1 }}}}"
            f'{{{{ if eq .Role "user" }}}}{late}{{{{ .Content }}}}{prompt}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{{{{ if not $last }}}}{question}{{{{ end }}}}'
            "{{ end }}{{ end }}"
        )


def _literal(text: str) -> str:
    """Escapes the parts of a text that Go templates or Modelfiles would interpret."""
    text = text.replace("{{", '{{ "{{" }}').replace('"""', r'{{ "\"\"\"" }}')
    if text.endswith("{"):  # an action of the template may follow
        text = text[:-1] + '{{ "{" }}'
    shown = (c if c.isprintable() or c in "\n\t" else f'{{{{ "\\U{ord(c):08x}" }}}}' for c in text)
    return "".join(shown)


def chat_format(tokenizer: TokenizerParts) -> ChatFormat:
    """Finds the format of a tokenizer's chat template.

    Raises ConfigError if the template does more than put text around turns.
    """
    template = tokenizer.chat_template
    assert template is not None
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {name: tokenizer.token(index) or "" for name, index in ids.items()}

    def render(messages: Messages) -> str | None:
        rendered = render_prefixes(template, names, messages, [(len(messages), True)])[0]
        return None if rendered.refusal is not None else rendered.text

    try:
        found = _find_format(render)
    except UnusableTemplateError as error:
        raise ConfigError(f"{error}; fix the template.") from None
    if found is None:
        raise ConfigError(
            "the model's chat template cannot be written for Ollama, because it does more than put fixed text around "
            "each turn; use --format gguf with llama.cpp, which runs the template itself."
        )
    return found


def _find_format(render: Render) -> ChatFormat | None:
    """Infers the text around turns from rendered conversations; returns None if it does not explain others."""
    turns = [turn for pair in zip(_QUESTIONS, (*_ANSWERS, ""), strict=True) for turn in pair if turn]
    plain = _between(render(_conversation(turns)), turns)
    if plain is None:
        return None
    start, answer, question, _, _, prompt = plain
    found = ChatFormat(start, answer, question, prompt)
    with_system = render(_conversation(turns, _SYSTEM))
    if with_system is not None and _SYSTEM in with_system:
        if (early := _between(with_system, [_SYSTEM, *turns])) is not None:
            found = replace(found, system=(early[0], early[1]))
        elif (late := _between(with_system, [*turns[:-1], _SYSTEM, turns[-1]])) is not None:
            found = replace(found, system=(late[4].removeprefix(question), late[5]), is_system_late=True)
    conversations = [_conversation(_CHECKED[:count]) for count in (1, 3, 5)]
    if found.system is not None:
        conversations += [_conversation(_CHECKED[:count], "Be brief.\nBe kind.") for count in (1, 3, 5)]
    return found if all(render(messages) == found.render(messages) for messages in conversations) else None


def _conversation(turns: Sequence[str], system: str | None = None) -> Messages:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(turns)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _between(text: str | None, contents: Sequence[str]) -> list[str] | None:
    """Splits a text at each of `contents`, which must occur once and in this order; returns None otherwise."""
    parts, rest = [], text or ""
    if any(rest.count(content) != 1 for content in contents):
        return None
    for content in contents:
        before, separator, rest = rest.partition(content)
        if not separator:
            return None
        parts.append(before)
    return [*parts, rest]


def stop_texts(tokenizer: TokenizerParts, found: ChatFormat | None) -> list[str]:
    """Returns the texts that end an answer: end tokens, what the chat template writes, and its special tokens."""
    special = [token["content"] for token in json.loads(tokenizer.json)["added_tokens"] if token["special"]]
    texts = "" if found is None else "\0".join([found.start, found.answer, found.question, *(found.system or ())])
    ends = [*(tokenizer.token(index) for index in tokenizer.end_ids), tokenizer.turn_end.strip()]
    return list(dict.fromkeys([*filter(None, ends), *(token for token in special if token in texts)]))


def model_name(name: str) -> str:
    """Returns the closest name that Ollama accepts for a model."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"


def modelfile(
    file: str, template: str, stops: Sequence[str], parameters: Mapping[str, Any], system: str | None = None
) -> str:
    """Returns the content of a Modelfile for a GGUF file in the same folder.

    Leaves out a system message that a Modelfile cannot express. Raises ConfigError for such a stop text or parameter,
    which could otherwise add lines of its own.
    """
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    if system is not None and is_expressible(system):
        lines.append(f'SYSTEM """{system}"""')
    for stop in stops:
        if not is_expressible(stop):
            raise ConfigError(
                f"the text {shown(stop)}, at which answers of the model end, contains three quotation marks or control "
                "characters, which a Modelfile cannot express; use --format gguf with llama.cpp."
            )
        lines.append(f'PARAMETER stop """{stop}"""' if {'"', "\n"} & set(stop) else f'PARAMETER stop "{stop}"')
    for name, value in parameters.items():
        if type(value) not in (int, float) or not isfinite(value):
            raise ConfigError(f"{name} in the model's settings is {shown(value)}; set it to a number.")
        lines.append(f"PARAMETER {name} {value}")
    return "\n".join(lines) + "\n"


def is_expressible(text: str) -> bool:
    """Returns whether a Modelfile can contain a text in three quotation marks, within which nothing is escaped."""
    return '"""' not in text and all(c.isprintable() or c in "\n\t" for c in text)

"""Chat templates: Jinja programs that come with models of others, which may loop or allocate without end.

transformers renders them in a sandbox that bounds neither time nor memory, so that a child process does it here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sansgpu.config.plain import first_line
from sansgpu.machine.contained import Contained, ContainedError

CPU_SECONDS = 2  # of all prefixes of a conversation, which take milliseconds
MOST_CHARACTERS = 64 << 20  # of one rendered conversation
Turn = Mapping[str, Any]


class UnusableTemplateError(Exception):
    """A template cannot be used at all. The message is a clause that says why."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as its template writes it.

    `spans` are the characters (start, stop) that the template marks as generated, if they were asked for. If the
    template refused the conversation, `refusal` says why, and there is no text.
    """

    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    refusal: str | None = None


def render_prefixes(
    template: str, names: Mapping[str, Any], turns: Sequence[Turn], wanted: Sequence[tuple[int, bool]]
) -> list[Rendered]:
    """Renders the first N turns for each (N, with the header of the answer to come) in `wanted`.

    `names` are the special tokens as the template knows them. Raises UnusableTemplateError if the template
    is no Jinja, does not end, or needs too much memory.
    """
    return _asked({"template": template, "names": dict(names), "turns": list(turns), "wanted": list(wanted)})


def render_spans(template: str, names: Mapping[str, Any], turns: Sequence[Turn]) -> Rendered:
    """Renders all turns and finds what `{% generation %}` marks. Raises as `render_prefixes` does."""
    return _asked({"template": template, "names": dict(names), "turns": list(turns), "wanted": None})[0]


def _asked(request: dict[str, Any]) -> list[Rendered]:
    import transformers.utils.chat_template_utils  # noqa: F401  before the child is forked, which then has it, too

    try:
        answer = json.loads(_RENDERER.ask(json.dumps(request, default=_placeholder).encode()))
    except ContainedError as error:
        raise UnusableTemplateError(f"the chat template {error}") from None
    if isinstance(answer, str):
        raise UnusableTemplateError(answer)
    return [Rendered(text, tuple((start, stop) for start, stop in spans), refusal) for text, spans, refusal in answer]


def _placeholder(value: Any) -> str:
    return f"<{type(value).__name__}>"  # as transformers shows a template what is no JSON


def _serve(request: bytes) -> bytes:
    """A list of (text, spans, refusal), or a text that says why the template cannot be used."""
    from jinja2.exceptions import TemplateSyntaxError

    asked = json.loads(request)
    try:
        if asked["wanted"] is None:
            answers = [_render(asked, asked["turns"], spans=True)]
        else:
            answers = [_render(asked, asked["turns"][:count], prompt=prompt) for count, prompt in asked["wanted"]]
    except TemplateSyntaxError as error:
        return json.dumps(f"line {error.lineno} of the chat template is no Jinja ({error.message})").encode()
    return json.dumps(answers).encode()


def _render(
    asked: dict[str, Any], turns: list[dict[str, Any]], prompt: bool = False, spans: bool = False
) -> tuple[Any, ...]:
    from jinja2.exceptions import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    options: dict[str, Any] = {"add_generation_prompt": prompt, "return_assistant_tokens_mask": spans, **asked["names"]}
    try:
        rendered: Any = render_jinja_template([turns], chat_template=asked["template"], **options)
    except (TemplateSyntaxError, MemoryError):
        raise
    except Exception as error:  # whatever a program raises
        return "", [], first_line(error)
    (text,), found = rendered
    if len(text) > MOST_CHARACTERS:
        return "", [], f"it writes more than {MOST_CHARACTERS >> 20} million characters"
    return text, found[0] if spans else [], None


_RENDERER = Contained(_serve, CPU_SECONDS)

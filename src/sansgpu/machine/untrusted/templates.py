"""Renders chat templates: untrusted Jinja programs, which may loop or allocate forever.

The sandbox of transformers limits neither time nor memory, so templates are rendered in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sansgpu.config.wording import first_line
from sansgpu.machine.untrusted.sandbox import Sandbox, SandboxError

CPU_SECONDS = 2  # time limit of all prefixes of a conversation, which usually take milliseconds
MAX_RENDERED_CHARS = 64 << 20  # limit of a conversation
TemplateMessage = Mapping[str, Any]


class UnusableTemplateError(Exception):
    """Raised if a template cannot be used at all. The message is a clause with the reason."""


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    `spans` are the character ranges (start, stop) that the template marks as generated, if requested. If the template
    rejects the conversation, `refusal` is the reason and `text` is empty.
    """

    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    refusal: str | None = None


def with_tools(names: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns a template's variables with the tools that a conversation may call, if any."""
    return {**names, "tools": list(tools)} if tools else names


def render_prefixes(
    template: str, names: Mapping[str, Any], turns: Sequence[TemplateMessage], prefixes: Sequence[tuple[int, bool]]
) -> list[Rendered]:
    """Renders the first N turns for each (N, whether to add the generation prompt) in `prefixes`.

    `names` has the template's variables: special tokens, and tools if there are any. Raises UnusableTemplateError if
    the template is not valid Jinja, does not terminate, or needs too much memory.
    """
    return _rendered({"template": template, "names": dict(names), "turns": list(turns), "prefixes": list(prefixes)})


def render_spans(template: str, names: Mapping[str, Any], turns: Sequence[TemplateMessage]) -> Rendered:
    """Renders all turns with the spans in `{% generation %}` blocks. Raises UnusableTemplateError."""
    return _rendered({"template": template, "names": dict(names), "turns": list(turns), "prefixes": None})[0]


def variables_in(template: str) -> list[str]:
    """Returns the names of the variables that a template reads. Raises UnusableTemplateError."""
    names: list[str] = _answer_of_child({"template": template})
    return names


def _rendered(request: dict[str, Any]) -> list[Rendered]:
    answer = _answer_of_child(request)
    return [Rendered(text, tuple((start, stop) for start, stop in spans), refusal) for text, spans, refusal in answer]


def _answer_of_child(request: dict[str, Any]) -> Any:
    import transformers.utils.chat_template_utils  # noqa: F401  imported before the fork, so that the child has it

    try:
        answer = json.loads(_RENDERER.call(json.dumps(request, default=_placeholder).encode()))
    except SandboxError as error:
        raise UnusableTemplateError(f"the chat template {error}") from None
    if isinstance(answer, str):
        raise UnusableTemplateError(answer)
    return answer


def _placeholder(value: Any) -> str:
    return f"<{type(value).__name__}>"  # for values that JSON cannot hold


def _serve(request: bytes) -> bytes:
    """Returns a JSON list of (text, spans, refusal), or a JSON string with the reason why the template is unusable.

    For a request without turns, the list contains the names of the template's variables.
    """
    from jinja2.exceptions import TemplateSyntaxError

    inputs = json.loads(request)
    try:
        if "turns" not in inputs:
            answers: list[Any] = _variables(inputs["template"])
        elif inputs["prefixes"] is None:
            answers = [_render(inputs, inputs["turns"], spans=True)]
        else:
            answers = [_render(inputs, inputs["turns"][:count], prompt=prompt) for count, prompt in inputs["prefixes"]]
    except TemplateSyntaxError as error:
        return json.dumps(f"line {error.lineno} of the chat template is not valid Jinja ({error.message})").encode()
    return json.dumps(answers).encode()


def _variables(template: str) -> list[str]:
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Any = _compile_jinja_template(template).environment
    return sorted(meta.find_undeclared_variables(environment.parse(template)))


def _render(
    request: dict[str, Any], turns: list[dict[str, Any]], prompt: bool = False, spans: bool = False
) -> tuple[Any, ...]:
    from jinja2.exceptions import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    options: dict[str, Any] = {
        "add_generation_prompt": prompt,
        "return_assistant_tokens_mask": spans,
        **request["names"],
    }
    try:
        rendered: Any = render_jinja_template([turns], chat_template=request["template"], **options)
    except (TemplateSyntaxError, MemoryError):
        raise
    except Exception as error:  # templates may raise anything
        return "", [], first_line(error)
    (text,), found = rendered
    if len(text) > MAX_RENDERED_CHARS:
        return "", [], f"it produces more than {MAX_RENDERED_CHARS >> 20} million characters"
    return text, found[0] if spans else [], None


_RENDERER = Sandbox(_serve, CPU_SECONDS)

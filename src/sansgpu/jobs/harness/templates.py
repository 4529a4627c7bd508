"""Renders the templates of tasks, which are untrusted programs, in a child process with bounded time and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import lm_eval.utils
from jinja2 import Template
from jinja2.sandbox import SandboxedEnvironment

from sansgpu.config.wording import first_line, truncate
from sansgpu.machine.untrusted.sandbox import Sandbox, SandboxError

CPU_SECONDS = 2  # time limit of one text, which usually takes less than a millisecond
MAX_SHOWN = 60  # characters of a template in messages
MAX_CHARACTERS = 16 << 20  # limit of one text; the longest documents of the library's tasks have a twentieth


class TemplateError(Exception):
    """Raised if a template cannot be rendered. The message is a clause with the reason."""


def sandboxed_environment() -> SandboxedEnvironment:
    """Returns the library's environment of templates with Jinja's sandbox."""
    plain = lm_eval.utils.env
    sandbox = SandboxedEnvironment(undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline)
    sandbox.filters.update(plain.filters)
    return sandbox


def render(template: str, row: Mapping[str, Any]) -> str:
    """Renders a template for a row of data like `lm_eval.utils.apply_template`. Raises TemplateError."""
    try:
        text, problem = json.loads(_RENDERER.call(json.dumps([template, row], default=str).encode()))
    except SandboxError as error:
        raise TemplateError(f"its template {truncate(template, MAX_SHOWN)} {error}") from None
    if problem:
        raise TemplateError(problem)
    return str(text)


def _serve(request: bytes) -> bytes:
    """Returns a JSON list of the text and the problem, one of which is empty."""
    template, row = json.loads(request)
    try:
        text = _compiled(template).render(**row)
    except MemoryError:
        raise
    except Exception as error:  # templates may raise anything
        return json.dumps(["", f"{type(error).__name__}: {first_line(error)}"]).encode()
    if len(text) > MAX_CHARACTERS:
        return json.dumps(["", f"its template produces more than {MAX_CHARACTERS >> 20} million characters"]).encode()
    return json.dumps([text, ""]).encode()


@lru_cache
def _compiled(template: str) -> Template:
    """Runs in the child process, which compiles each template of a task once."""
    return sandboxed_environment().from_string(template)


_RENDERER = Sandbox(_serve, CPU_SECONDS)

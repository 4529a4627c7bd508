"""Variables for chat templates, such as `enable_thinking`: defaults in the template, and values for one rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.data import is_template_variable
from sansgpu.config.wording import shown
from sansgpu.machine.untrusted.templates import UnusableTemplateError, variables_in

Variables = Mapping[str, Any]
NO_VARIABLES: Variables = {}


def set_template_variables(tokenizer: Any, variables: Variables) -> None:
    """Makes values the defaults of variables in a tokenizer's chat template.

    They are written into the template, so that every program that loads the saved tokenizer uses them, too. Raises
    ConfigError if there is no template, or it does not use them.
    """
    if not variables:
        return
    require_variables(tokenizer, variables)
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in variables.items()
    )
    found = tokenizer.chat_template
    tokenizer.chat_template = (
        {name: defaults + template for name, template in found.items()} if isinstance(found, dict) else defaults + found
    )


def require_variables(tokenizer: Any, variables: Variables) -> None:
    """Raises ConfigError if the chat template does not use all the variables."""
    if not variables:
        return
    if tokenizer.chat_template is None:
        raise ConfigError("the model has no chat template to use template variables; remove them.")
    used = (name for name in _variables_of(tokenizer) if name not in tokenizer.SPECIAL_TOKENS_ATTRIBUTES)
    known = [name for name in used if is_template_variable(name)]
    for name in variables:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            uses = f"it uses {', '.join(known)}" if known else "it uses none"
            raise ConfigError(
                f"the chat template has no variable {shown(name)} ({f'did you mean {near[0]}?' if near else uses}); "
                "change or remove it."
            )


def _variables_of(tokenizer: Any) -> list[str]:
    found = tokenizer.chat_template
    names = dict.fromkeys(
        name
        for template in (found.values() if isinstance(found, dict) else [found])
        for name in _variables_in(str(template))
    )
    return list(names)


@lru_cache(maxsize=16)
def _variables_in(template: str) -> tuple[str, ...]:
    try:
        return tuple(variables_in(template))
    except UnusableTemplateError as error:
        raise ConfigError(f"{error}; choose a different chat template.") from None


def _literal(value: Any) -> str:
    """Returns a value of a configuration as a Jinja literal."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)

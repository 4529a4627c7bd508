"""Writes a configuration as YAML in which a comment explains each key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from sansgpu.config.load import setting
from sansgpu.config.parse import Values
from sansgpu.config.schema import Config
from sansgpu.config.section import all_keys

MAX_WIDTH = 110  # characters per line of a comment


def commented_yaml(config: Config, head: str, comments: Mapping[str, str] | None = None) -> str:
    """Returns the values that are not defaults and those of the dotted keys in `comments`, under the text `head`.

    Above each key stands its comment, or else its meaning from the schema.
    """
    meanings = {key: field.description or "" for key, field in all_keys(Config)}
    meanings["task"] = f"kind of run: {config.settings.description or 'your own class'}"
    values = config.model_dump(mode="json", exclude_defaults=True)
    values = {"task": config.task, **values}
    for key in comments or {}:
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = setting(config, key)
    return "\n".join([*_comment(head, ""), *_lines(values, "", "", {**meanings, **(comments or {})})]) + "\n"


def _lines(values: Values, prefix: str, indent: str, meanings: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, f"{prefix}{key}.", f"{indent}  ", meanings)
        else:
            yield from _comment(meanings.get(f"{prefix}{key}", ""), indent)
            yield f"{indent}{_pair(key, value)}"


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(" ".join(text.split()), MAX_WIDTH)]


def _pair(key: str, value: Any) -> str:
    """Returns `key: value` on one line."""
    text = yaml.safe_dump([value], allow_unicode=True, width=float("inf"), default_flow_style=True)
    return f"{key}: {text.strip()[1:-1]}"

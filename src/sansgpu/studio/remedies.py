"""Buttons that write a key, for the keys that a message names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sansgpu.config import ConfigError, change_config
from sansgpu.config.schema import Config
from sansgpu.config.section import all_keys, declared_keys
from sansgpu.jobs.init.answers import PURPOSES
from sansgpu.jobs.init.sample import reading_config
from sansgpu.studio.project import Choices
from sansgpu.tasks.configuration import SCHEMA

MAX_REMEDIES = 8
REMOTE_CODE = "model.trust_remote_code"
# key=value or "key: value", where a value in quotes may have spaces
_SETTING = re.compile(r"""\b((?:data|model|training)\.[a-z_]+)(?:=|: )("[^"]+"|'[^']+'|\[[^\]]+\]|[\w./+-]+)""")
_QUOTED = re.compile(r"""--set '((?:data|model|training)\.[a-z_]+=[^']+)'""")
_KEY = re.compile(r"\b(?:data|model|training)\.[a-z_]+")
_COLUMNS = re.compile(r"(?:the columns?|only) ([^;]+);")
_TASK = re.compile(r"--task ([a-z]+)")


@dataclass(frozen=True)
class Remedy:
    """A key with the value that a button writes, or with none if the user has to enter one. Key `task`: the task."""

    key: str
    value: str | None
    meaning: str = ""


def fields_by_key() -> dict[str, Any]:
    """Returns the declarations of all keys that a run may have."""
    return dict(all_keys(SCHEMA))


def config_with(answers: Choices) -> Config:
    """Returns the configuration of the choices. Raises ConfigError if a setting cannot be used."""
    config = reading_config(answers.data or "data", answers.task or next(iter(PURPOSES)))
    return change_config(config, list(answers.settings))


def remedies(message: str, answers: Choices) -> list[Remedy]:
    """Returns the remedies that a message proposes, and those that act on the keys that it names."""
    found = dict.fromkeys(_proposed(message, answers))
    return [remedy for remedy in found if _is_useful(remedy, answers)][:MAX_REMEDIES]


def _proposed(message: str, answers: Choices) -> Iterator[Remedy]:
    fields = fields_by_key()
    columns = [name for names in _COLUMNS.findall(message) for name in names.split(", ")]
    quoted = [match.partition("=")[::2] for match in _QUOTED.findall(message)]
    for name in _TASK.findall(message):
        if name in PURPOSES:
            yield Remedy("task", name, PURPOSES[name].words)
    settings = dict(_SETTING.findall(message)) | dict(quoted)
    for key, value in settings.items():
        yield Remedy(key, value.strip("\"'"))
    for key in dict.fromkeys(_KEY.findall(message)):
        if key in fields and key not in settings:
            values = choices(fields[key].annotation) or (columns if key.endswith("_column") else [])
            yield from (Remedy(key, value) for value in values)
            if not values:
                yield Remedy(key, None, fields[key].description or "")


def choices(annotation: Any) -> list[str]:
    """Returns the values of a key that has only a few, as text."""
    origin = get_origin(annotation)
    if annotation is bool:
        return ["true", "false"]
    if origin is Literal:
        return [str(value) for value in get_args(annotation)]
    if origin is Annotated:
        return choices(get_args(annotation)[0])
    if origin in (Union, UnionType):
        inside = [one for one in get_args(annotation) if one is not type(None)]
        return [value for one in inside for value in choices(one)] if all(map(choices, inside)) else []
    return []


def _is_useful(remedy: Remedy, answers: Choices) -> bool:
    """Returns whether the remedy would change something, and is valid.

    None lets code run, because a message may quote a stranger's file.
    """
    if remedy.key == "task":
        return remedy.value != answers.task
    if remedy.key in (REMOTE_CODE, *declared_keys(SCHEMA, "runs_code")):
        return False
    if remedy.value is None:
        return True
    try:
        return config_with(answers) != config_with(answers.with_setting(f"{remedy.key}={remedy.value}"))
    except ConfigError:
        return False

"""Turns pydantic's errors into clauses that name the key, its value and what to write instead."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from sansgpu.config.wording import counted, shown, truncate

TOP_LEVEL_KEYS = ("device", "force_cpu")  # keys of `training` that a file may also set at the top level
MAX_UNKNOWN_KEYS, MAX_WRONG_VALUES = 5, 10  # named in one message
MAX_SUGGESTION_LENGTH = 40  # longer keys get no "did you mean"


def problems(
    error: ValidationError, root: type[BaseModel], with_unknown: bool = True, section: tuple[str, ...] = ()
) -> list[str]:
    """Returns a clause for each of the first wrong keys, and the number of the remaining ones.

    `root` is the class of the whole configuration, and `section` the path of the section that was validated. pydantic
    reports every member of a union that did not match; they are joined to one clause with alternatives.
    """
    unknown: dict[str, list[str]] = {}  # paths by name
    wrong: dict[str, str] = {}  # clauses by key
    for item in error.errors(include_url=False):
        path = _field_path(root, (*section, *item["loc"]))
        where = truncate(".".join(path))
        if item["type"] == "extra_forbidden":
            unknown |= {where: path} if with_unknown else {}
        elif item["type"] == "value_error":
            wrong[where] = f"{where}: {item['ctx']['error']}" if where else str(item["ctx"]["error"])
        elif item["type"] in ("model_type", "dict_type"):
            wrong[where] = f"{where or 'it'} is {shown(item['input'])}, but a section must contain keys and values"
        elif where not in wrong:
            wrong[where] = f"{where} is {shown(item['input'])}, but {item['msg'][0].lower()}{item['msg'][1:]}"
        elif (other := item["msg"].removeprefix("Input should be ")) not in wrong[where]:
            wrong[where] += f", or {other}"
    named = [f"unknown key {where}{_nearest(root, path)}" for where, path in list(unknown.items())[:MAX_UNKNOWN_KEYS]]
    more = (
        [f"{counted(len(unknown) - MAX_UNKNOWN_KEYS, 'more unknown key')}"] if len(unknown) > MAX_UNKNOWN_KEYS else []
    )
    rest = [f"{counted(len(wrong) - MAX_WRONG_VALUES, 'more wrong value')}"] if len(wrong) > MAX_WRONG_VALUES else []
    return [*named, *more, *list(wrong.values())[:MAX_WRONG_VALUES], *rest]


def _field_path(root: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys in an error's location, without pydantic's tags for union members."""
    path: list[str] = []
    model: Any = root
    for part in location:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
        path.append(str(part))
        field = model.model_fields.get(str(part))
        model = field.annotation if field else None
    return path


def _nearest(root: type[BaseModel], path: list[str]) -> str:
    model: Any = root
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    known = list(model.model_fields) + (list(TOP_LEVEL_KEYS) if model is root else [])
    if len(path[-1]) > MAX_SUGGESTION_LENGTH:
        return ""
    if near := difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5):
        return f" (did you mean {'.'.join([*path[:-1], near[0]])}?)"
    sections = [
        s for s, field in root.model_fields.items() if path[-1] in getattr(field.annotation, "model_fields", ())
    ]
    return f" (it belongs in {sections[0]})" if sections else f" (known keys: {', '.join(known)})"

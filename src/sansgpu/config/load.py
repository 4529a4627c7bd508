"""Files, overrides and their errors: text -> Config."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from sansgpu.config.by_task import KINDS, PRETRAIN, kinds_with, with_defaults
from sansgpu.config.errors import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.parse import Values, parse_value, read_values
from sansgpu.config.plain import MOST_DEPTH, cut, shown
from sansgpu.config.schema import Config

# What a run without a file changes of the defaults: minutes on two cores, and samples to look at.
BUILT_IN: Values = {"training": {"max_steps": 500, "sample_tokens": 64}}

MOST_UNKNOWN, MOST_WRONG = 5, 10  # keys that one message names
LONGEST_KEY = 40  # characters for which a similar key is searched
LIMITS = {f"training.{key}" for key in ("num_epochs", "max_steps", "max_tokens", "max_hours", "until")}

PRESETS = ("small", "medium", "large")  # may stand in place of a file: models of a known size


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The configuration of a file or a preset (none: the built-in default), with `key.path=value` overrides.

    Returns it with notes for the user, each said once: what was dropped and why.
    Raises ConfigError naming the file and every problem in it.
    """
    if path and str(path) in PRESETS and not path.exists():
        path = Path(__file__).parent / "presets" / f"{path}.yaml"
    asked = {override.partition("=")[0].strip() for override in overrides}
    values = read_values(path) if path else {} if "task" in asked else copy.deepcopy(BUILT_IN)
    if values and path is None and asked & LIMITS:
        del values["training"]["max_steps"]  # a length of ours, and one is asked for
    for override in overrides:
        _override(values, override)
    where = str(path) if path else "the configuration"
    if isinstance(sampling := values.get("sampling"), dict) and sampling.get("stream"):
        raise ConfigError(
            f"{where}: sampling.stream writes to whoever reads at the time, which no training run can repeat; leave it "
            "out, and stream by `sansgpu generate` or `sansgpu chat`."
        )
    return as_config(values, where), _notes(values)


def change_config(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `key.path=value` overrides. Raises ConfigError where they do not fit together."""
    values = config.model_dump()
    for override in overrides:  # the device may also stand at the top, where a dump does not have it
        _override(values, f"training.{override}" if override.startswith(("device=", "force_cpu=")) else override)
    return as_config(values)


def as_config(values: Values, where: str = "the configuration") -> Config:
    """The configuration of these values. Raises ConfigError naming `where` and every problem."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(problems(error))}.") from None


def recorded_values(path: Path) -> Values:
    """The values of a run's config.yaml, as they stand there. Keys that this version does not know are ignored.

    Raises ConfigError where the file cannot be read, or a key has a value that the schema refuses.
    """
    values = read_values(path)
    try:
        Config.model_validate(values)
    except ValidationError as error:
        if wrong := problems(error, with_unknown=False):
            raise ConfigError(f"{path}: {'; '.join(wrong)}.") from None
    return values


def save_config(config: Config, path: Path) -> None:
    """Write every key that acts in `config`'s kind of run, in the form `load_config` reads."""
    path.write_text(yaml.safe_dump(acting_values(config), sort_keys=False, allow_unicode=True), encoding="utf-8")


def acting_values(config: Config) -> Values:
    """All that acts in `config`'s kind of run, as plain values."""
    values = config.model_dump(mode="json")
    for name, section in values.items():
        if isinstance(section, dict):
            values[name] = {k: v for k, v in section.items() if config.kind in kinds_with(f"{name}.{k}")}
    top = {"task": values.pop("task"), "device": values["training"].pop("device")}
    return {**top, **values}


def default_values(values: Values) -> Values:
    """What every key is by default in a run of the kind that `values` (as `acting_values` gives them) are of: by
    `section.key`, and task and device.
    """
    model = values.get("model") or {}
    chosen = {key: model[key] for key in ("name_or_path", "adapter") if key in model}
    own = with_defaults(str(values.get("task", PRETRAIN)), {"model": chosen})
    found: Values = {"task": PRETRAIN}
    for section, field in Config.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        found |= {f"{section}.{k}": (own.get(section) or {}).get(k, inner.default) for k, inner in keys.items()}
    found |= {f"model.{key}": field.default for key, field in ModelConfig.model_fields.items() if key in chosen}
    return {**found, "device": found["training.device"]}


def _override(values: Values, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {cut(override)} has no value; write --set key.path=value.")
    *sections, name = key.strip().split(".")
    if len(sections) > MOST_DEPTH:
        raise ConfigError(f"--set {cut(override)}: a key has at most {MOST_DEPTH} parts.")
    for section in sections:
        if values.get(section) is None:  # not there, or without keys
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(f"--set {cut(override)}: {section} is no section.")
    values[name] = parse_value(text)


def _notes(values: Values) -> list[str]:
    training = values.get("training") or {}
    if training.get("dataloader_num_workers") == 0 and training.get("dataloader_prefetch_factor") is not None:
        return ["training.dataloader_prefetch_factor is dropped: with 0 workers nothing is prefetched."]
    return []


def problems(error: ValidationError, with_unknown: bool = True) -> list[str]:
    """A clause per wrong key, of many the first ones and how many follow.

    A union reports every member that did not match; the first names the value, the others what else is possible.
    """
    unknown: dict[str, list[str]] = {}  # paths by their names
    wrong: dict[str, str] = {}  # clauses by the names of their keys
    for item in error.errors(include_url=False):
        path = _field_path(item["loc"])
        where = cut(".".join(path))
        if item["type"] == "extra_forbidden":
            unknown |= {where: path} if with_unknown else {}
        elif item["type"] == "value_error":
            wrong[where] = f"{where}: {item['ctx']['error']}" if where else str(item["ctx"]["error"])
        elif item["type"] in ("model_type", "dict_type"):
            wrong[where] = f"{where or 'it'} is {shown(item['input'])}, but a section holds keys and values"
        elif where not in wrong:
            wrong[where] = f"{where} is {shown(item['input'])}, but {item['msg'][0].lower()}{item['msg'][1:]}"
        elif (other := item["msg"].removeprefix("Input should be ")) not in wrong[where]:
            wrong[where] += f", or {other}"
    named = [f"unknown key {where}{_nearest(path)}" for where, path in list(unknown.items())[:MOST_UNKNOWN]]
    more = [f"{len(unknown) - MOST_UNKNOWN:,} more unknown keys"] if len(unknown) > MOST_UNKNOWN else []
    rest = [f"{len(wrong) - MOST_WRONG:,} more wrong values"] if len(wrong) > MOST_WRONG else []
    return [*named, *more, *list(wrong.values())[:MOST_WRONG], *rest]


def _field_path(location: tuple[int | str, ...]) -> list[str]:
    """The part of an error's location that names keys, without pydantic's tags for members of a union."""
    path: list[str] = []
    model: Any = Config
    for part in location:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
        path.append(str(part))
        field = model.model_fields.get(str(part))
        model = field.annotation if field else None
    return path


def _nearest(path: list[str]) -> str:
    model: Any = Config
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    known = list(model.model_fields) + (["device", "force_cpu"] if model is Config else [])
    if len(path[-1]) > LONGEST_KEY:
        return ""
    if near := difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5):
        return f" (did you mean {'.'.join([*path[:-1], near[0]])}?)"
    sections = [
        s for s, field in Config.model_fields.items() if path[-1] in getattr(field.annotation, "model_fields", ())
    ]
    return f" (it belongs in {sections[0]})" if sections else f" (known are {', '.join(known)})"


def describe(model: type[BaseModel] = Config, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every key of the schema, for help and documentation."""
    rows: list[tuple[str, str, str]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += describe(field.annotation, f"{name}.")
            continue
        choices = [str(a) for a in get_args(field.annotation) if isinstance(a, str)]
        meaning = (field.description or "") + (f" ({', '.join(choices)})" if choices else "")
        if (kinds := kinds_with(prefix + name)) != KINDS:
            meaning += f" · {', '.join(kinds)}"
        rows.append((prefix + name, json.dumps(field.default), meaning))
    return rows

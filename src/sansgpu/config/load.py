"""Files, overrides and their errors: text -> Config."""

from __future__ import annotations

import copy
import difflib
import json
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from sansgpu.config.by_task import KINDS, PRETRAIN, kinds_with, with_defaults
from sansgpu.config.errors import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.schema import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Values = dict[str, Any]

# What a run without a file changes of the defaults: minutes on two cores, and samples to look at.
BUILT_IN: Values = {"training": {"max_steps": 500, "sample_tokens": 64}}


LIMITS = {f"training.{key}" for key in ("num_epochs", "max_steps", "max_tokens", "max_hours", "until")}


class _UniqueKeyLoader(yaml.SafeLoader):
    """yaml.SafeLoader that refuses a key given twice, of which one would silently not act."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} is given twice, again in line {node.start_mark.line + 1} or below")
        return super().construct_mapping(node, deep=deep)


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


def read_values(path: Path) -> Values:
    """The keys and values of a file. Raises ConfigError where it cannot be read, or holds something else."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a .yaml, .toml or .json file.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        raise ConfigError(
            f"{path} does not exist{f'; did you mean {path.parent / near[0]}' if near else ''}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    try:
        values = _parse(path, text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be parsed: {' '.join(str(error).split())}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not keys and values; see configs/ for examples.")
    return values


def _parse(path: Path, text: str) -> Any:
    match path.suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text, object_pairs_hook=_unique_pairs)
        case ".yaml" | ".yml":
            return yaml.load(text, Loader=_UniqueKeyLoader)
    raise ConfigError(f"{path} has no known form; name it .yaml, .toml or .json.")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> Values:
    """A JSON object's keys, each given once."""
    keys = [key for key, _ in pairs]
    twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
    if twice is not None:
        raise json.JSONDecodeError(f"the key {twice!r} is given twice", "", 0)
    return dict(pairs)


def _override(values: Values, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override} has no value; write --set key.path=value.")
    *sections, name = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override}: {section} is no section.")
    try:
        values[name] = yaml.safe_load(text)
    except yaml.YAMLError:
        values[name] = text


def _notes(values: Values) -> list[str]:
    training = values.get("training") or {}
    if training.get("dataloader_num_workers") == 0 and training.get("dataloader_prefetch_factor") is not None:
        return ["training.dataloader_prefetch_factor is dropped: with 0 workers nothing is prefetched."]
    return []


def problems(error: ValidationError) -> list[str]:
    """One clause per wrong key. A union reports every member that did not match; the first speaks for all."""
    clauses: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = _field_path(item["loc"])
        where = ".".join(path)
        if item["type"] == "extra_forbidden":
            clause = f"unknown key {where}{_nearest(path)}"
        elif item["type"] == "value_error":
            clause = f"{where}: {item['ctx']['error']}" if where else str(item["ctx"]["error"])
        else:
            given = json.dumps(item["input"], default=str)
            clause = f"{where} is {given}, but {item['msg'][0].lower()}{item['msg'][1:]}"
        if where in clauses and item["type"] != "value_error":
            clauses[where] += f", or {item['msg'].removeprefix('Input should be ')}"
        else:
            clauses[where] = clause
    return list(clauses.values())


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

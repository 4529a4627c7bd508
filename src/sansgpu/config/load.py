"""Loads, overrides, validates and saves configurations."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import ValidationError

from sansgpu.config.errors import ConfigError
from sansgpu.config.find import built_in, configuration_file, use_files_beside
from sansgpu.config.learning_rate import default_learning_rate
from sansgpu.config.model import ModelConfig
from sansgpu.config.other_names import note_of, own_name, require_batch_size, with_own_names
from sansgpu.config.parse import Values, parse_value, read_values
from sansgpu.config.plain_data import MAX_DEPTH
from sansgpu.config.schema import Config
from sansgpu.config.section import AUTO, TOP_LEVEL_KEYS, all_keys, problems
from sansgpu.config.training import unused_settings
from sansgpu.config.wording import shown, truncate

MAPPINGS = frozenset(key for key, field in all_keys(Config) if get_origin(field.annotation) is dict)  # no sections
FindSchema = Callable[[Values, bool], type[Config]]  # (values, trusted; see `load_config`) -> schema of their task
Override = str | tuple[str, Any]  # `key.path=value` with the value in YAML, or a key and its value


def load_config(
    schema_for: FindSchema,
    path: Path | None = None,
    overrides: Sequence[Override] = (),
    trusted: bool = True,
    find_beside: bool = True,
    processes: int = 1,
) -> tuple[Config, list[str]]:
    """Loads a configuration file, given by path or name, or the built-in default if `path` is None.

    Then applies the overrides. If the file is `trusted`, because the user wrote it, a task that it names as
    `package.module:Class` is imported and, with `find_beside`, paths that do not exist in the working directory are
    looked up in the file's folder. `processes` is the number of processes that will train.

    Returns the configuration and notes for the user about ignored and renamed keys and ambiguous paths.
    Raises ConfigError naming the file and every problem in it.
    """
    path, renamed = configuration_file(path) if path else (None, [])
    where = str(path) if path else "the configuration"
    overridden = [overridden_key(override) for override in overrides]
    values, replaced = with_own_names(read_values(path) if path else built_in(overridden), where)
    notes, overriding_notes = [*renamed, *note_of(replaced)], _override(values, overrides)
    schema = schema_for(values, trusted)
    if path and trusted and find_beside:
        notes += use_files_beside(schema, values, path.parent, overridden)
    config = as_config(schema, values, where)
    overriding = [overridden_key(one) for one in overrides if key_and_value(one)[0] == "training.batch_size"]
    require_batch_size(config.training, overriding[-1:] or replaced, processes)
    return config, [*notes, *overriding_notes, *unused_settings(values)]


def change_config(config: Config, overrides: Sequence[Override]) -> Config:
    """Applies the overrides to `config`. Raises ConfigError if the result is invalid."""
    values = config.given_values()
    _override(values, overrides)
    return as_config(type(config), values)


def overridden_key(override: Override) -> str:
    return override.partition("=")[0].strip() if isinstance(override, str) else override[0]


def as_config(schema: type[Config], values: Values, where: str = "the configuration") -> Config:
    """Validates plain values. Raises ConfigError naming `where` and every problem."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(problems(error, schema))}.") from None


def recorded_values(schema_for: FindSchema, path: Path) -> Values:
    """Reads the values of a run's config.yaml without defaults. Keys unknown to this version are not validated.

    Raises ConfigError if the file cannot be read or a value is invalid.
    """
    values = read_values(path)
    schema = schema_for(values, False)
    try:
        schema.model_validate(values)
    except ValidationError as error:
        if wrong := problems(error, schema, with_unknown=False):
            raise ConfigError(f"{path}: {'; '.join(wrong)}.") from None
    return values


def save_config(config: Config, path: Path) -> None:
    """Writes all `acting_values` in the format that `load_config` reads."""
    path.write_text(yaml.safe_dump(acting_values(config), sort_keys=False, allow_unicode=True), encoding="utf-8")


def acting_values(config: Config) -> Values:
    """Returns the values of all keys that have an effect in `config`'s kind of run, as plain values by section.

    Omits the learning rate if it is a default that depends on an optimizer that is not chosen yet. An implied single
    epoch stays unset, so that a resumed run may set another limit.
    """
    values = config.model_dump(mode="json")
    for name, section in values.items():
        if isinstance(section, dict):
            values[name] = {k: v for k, v in section.items() if config.acts(f"{name}.{k}")}
    if config.training.optimizer == "auto" and "learning_rate" not in config.training.model_fields_set:
        del values["training"]["learning_rate"]  # its default depends on the optimizer that the run will choose
    if config.training.num_epochs == 1 and "num_epochs" not in config.training.model_fields_set:
        values["training"]["num_epochs"] = None
    top = {"task": values.pop("task"), "device": values["training"].pop("device")}
    return {**top, **values}


def flatten(values: Values, prefix: str = "") -> Values:
    """Returns values by dotted key after `prefix`, e.g. `training.learning_rate`. Mappings as values stay whole."""
    flat: Values = {}
    for name, value in values.items():
        key = prefix + name
        is_section = isinstance(value, dict) and key not in MAPPINGS
        flat |= flatten(value, f"{key}.") if is_section else {key: value}
    return flat


def setting(config: Config, key: str) -> Any:
    """Returns the value of a dotted key."""
    return attrgetter(key)(config)


def default_values(schema: type[Config], values: Values) -> Values:
    """Returns the defaults for the kind of run in `values`, a result of `acting_values`.

    The keys are dotted, e.g. `training.seed`, or `task` and `device`.
    """
    model = values.get("model") or {}
    chosen = {key: model[key] for key in ("name_or_path", "adapter") if key in model}
    default_task = schema.default_task()
    own = schema.tasks.with_defaults(str(values.get("task", default_task)), {"model": chosen})
    found: Values = {"task": default_task}
    for key, field in all_keys(schema):
        section, _, name = key.partition(".")
        if name:
            default = (own.get(section) or {}).get(name, field.default)
            found[key] = str(default) if default is AUTO else default  # the same type as `acting_values` returns
    found["training.learning_rate"] = _default_learning_rate(values, own)
    found |= {f"model.{key}": field.default for key, field in ModelConfig.model_fields.items() if key in chosen}
    return {**found, "device": found["training.device"]}


def _default_learning_rate(values: Values, own: Values) -> float:
    """Returns the default rate for `values`, a result of `acting_values`; `own` holds the defaults of their task."""
    model, training = values.get("model") or {}, values.get("training") or {}
    width = float(model.get("d_model", ModelConfig.model_fields["d_model"].default))  # a file may have it as a string
    return default_learning_rate(training.get("optimizer", ""), width, (own.get("training") or {}).get("learning_rate"))


def _override(values: Values, overrides: Sequence[Override]) -> list[str]:
    """Applies the overrides. Returns notes about keys of other trainers and about replaced top-level keys."""
    notes, replaced, keys = [], [], set()
    for override in overrides:
        given, (key, value) = overridden_key(override), key_and_value(override)
        name = key.removeprefix("training.")
        if name in TOP_LEVEL_KEYS:
            top = values.pop(name, None)
            if given == key and top not in (None, value):
                notes.append(f"--set {key}={value} overrides {name}: {shown(top)} at the top level of the file.")
        if given not in (key, name):
            replaced.append(f"{given} as {key}")
        keys.add(key)
        _set(values, key, value)
    return [*note_of(replaced), *notes, *_shorten_windows(values, keys)]


def _shorten_windows(values: Values, overridden: set[str]) -> list[str]:
    """Lowers data.max_length to an overridden model.max_seq_len, unless it is overridden as well; returns a note."""
    model, data = values.get("model"), values.get("data")
    if {"model.max_seq_len", "data.max_length"} & overridden != {"model.max_seq_len"}:
        return []
    if not isinstance(model, dict) or not isinstance(data, dict):
        return []
    longest, length = model["max_seq_len"], data.get("max_length")
    if not isinstance(longest, int) or not isinstance(length, int) or length <= longest:
        return []
    data["max_length"] = longest
    return [f"data.max_length is {longest} instead of {length}, because it cannot be longer than model.max_seq_len."]


def key_and_value(override: Override) -> tuple[str, Any]:
    """Returns the full key and the value of an override, e.g. `training.device` for the top-level key `device`.

    Translates keys of other trainers.
    """
    if isinstance(override, str):
        text, equals, value = override.partition("=")
        if not equals or not text.strip():
            raise ConfigError(f"--set {truncate(override)} has no value; write --set key.path=value.")
        key, value = own_name(text.strip(), parse_value(value))
    else:
        key, value = override
    return f"training.{key}" if key in TOP_LEVEL_KEYS else key, value


def _set(values: Values, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    if len(sections) > MAX_DEPTH:
        raise ConfigError(f"--set {truncate(key)}: a key has at most {MAX_DEPTH} parts; see docs/configuration.md.")
    for section in sections:
        if values.get(section) is None:  # missing or empty
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(
                f"--set {truncate(key)}: {section} is not a section; write a section and one of its keys, e.g. "
                "training.max_steps=100."
            )
    values[name] = value


MAX_WIDTH = 110  # characters per line of a comment


def commented_yaml(config: Config, head: str, comments: Mapping[str, str] | None = None) -> str:
    """Returns YAML with all values that are not defaults of the task and with the dotted keys of `comments`.

    It starts with `head` as a comment. A comment above each key has its text in `comments`, or else its description in
    the schema.
    """
    meanings = {key: field.description or "" for key, field in all_keys(type(config))}
    meanings["task"] = f"kind of run: {config.settings.description or 'your own class'}"
    given = config.model_dump(mode="json")
    values = {"task": config.task, **config.model_dump(mode="json", exclude_defaults=True)}
    for section, defaults in config.tasks.defaults(config.task, given).items():
        changed = {name: given[section][name] for name, default in defaults.items() if given[section][name] != default}
        others = {name: value for name, value in values.get(section, {}).items() if name not in defaults}
        values[section] = changed | others
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

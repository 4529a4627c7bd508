"""Parses YAML, TOML and JSON files into plain values, with bounded time and memory for any input."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Hashable
from contextlib import suppress
from copy import deepcopy
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from sansgpu.config.errors import ConfigError
from sansgpu.config.plain_data import MAX_DEPTH, InvalidDataError, read_regular, reason_of, require_plain, unreadable
from sansgpu.config.wording import shown, truncate

Values = dict[str, Any]
SUFFIXES = (".yaml", ".yml", ".toml", ".json")
MAX_CONFIG_BYTES = 64 << 10  # PyYAML parses about this much per second
MAX_NODES = 10_000  # nodes of a YAML file with aliases expanded
_CLOCKS = "%H:%M", "%I%p", "%I:%M%p"  # 18:00, 6PM, 6:00PM


def normal_time(text: str) -> str:
    """Returns a time of day such as 18:00, 6PM or 6:30 pm as HH:MM, or a date with a time as local ISO 8601.

    Raises ValueError with a clause for the user.
    """
    for form in _CLOCKS:
        with suppress(ValueError):
            return datetime.strptime("".join(text.split()), form).strftime("%H:%M")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{truncate(text)} is not a time; write 18:00, 6PM or 2030-01-31T18:00") from None
    return (moment.astimezone().replace(tzinfo=None) if moment.tzinfo else moment).isoformat()


def finish_time(until: str, now: datetime) -> datetime:
    """Returns the next occurrence of a clock time such as `07:00`, or the given date and time.

    Raises ConfigError if the date and time are in the past.
    """
    if "T" not in until:
        clock = datetime.strptime(until, "%H:%M")
        today = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
        return today if today > now else today + timedelta(days=1)
    finish = datetime.fromisoformat(until)
    if finish <= now:
        raise ConfigError(f"training.until is {until}, which is in the past; set a later time with --until.")
    return finish


def read_values(path: Path) -> Values:
    """Reads a mapping from a file. Raises ConfigError if it cannot be read or contains anything else."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; pass a .yaml, .toml or .json file.")
        text = read_regular(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; pass the path of a .yaml, .toml or .json file.") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (InvalidDataError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; pass a configuration as UTF-8 text.") from None
    try:
        values = _parse(path, text)
        require_plain(values)
    except RecursionError:
        raise ConfigError(
            f"{path} cannot be parsed: values are nested more than {MAX_DEPTH} levels deep; a configuration has two."
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} cannot be parsed: {reason_of(error)}; correct the file.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} contains a value of type {type(values).__name__} instead of keys and values; see configs/ for "
            "examples."
        )
    return values


def parse_value(text: str) -> Any:
    """Parses the value of `--set KEY=TEXT` as YAML. Invalid YAML, and the sign of a block of text, stay a string."""
    try:
        return text if text in ("|", ">") else _yaml(text)
    except yaml.YAMLError:
        return text


def whole_number(text: str, largest: int) -> int | None:
    """Parses a number of decimal digits; None if it is anything else or above `largest`."""
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(largest))  # Python refuses 5,000 digits
    return int(text) if digits and int(text) <= largest else None


def _parse(path: Path, text: str) -> Any:
    match path.suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text, object_pairs_hook=_unique_pairs)
        case ".yaml" | ".yml":
            return deepcopy(_yaml_file(text, path.name))
    raise ConfigError(f"{path} has an unknown file type; name it .yaml, .toml or .json.")


@lru_cache(maxsize=8)
def _yaml_file(text: str, name: str) -> Any:
    """Parses a file only once, because several parts of a command read the same configuration."""
    return _yaml(text, name)


def _yaml(text: str, name: str = "the value") -> Any:
    loader = _Loader(text, name)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _unique_pairs(pairs: list[tuple[str, Any]]) -> Values:
    """Builds a JSON object and raises InvalidDataError on a repeated key."""
    found: Values = {}
    for key, value in pairs:
        if key in found:
            raise InvalidDataError(f"the key {shown(key)} is duplicated")
        found[key] = value
    return found


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader that limits nesting and alias expansion, and rejects repeated keys.

    As in YAML 1.2, 17:30 is a string; SafeLoader reads it as a number in base 60.
    Invalid scalars (`2025-02-30`, `!!int abc`, integers of thousands of digits) raise a YAMLError with the line number,
    where SafeLoader raises ValueError, AttributeError or KeyError.
    """

    def __init__(self, stream: str, name: str = "the value") -> None:
        super().__init__(stream)
        self.name = name  # named in error messages
        self._depth, self._nodes = 0, 0
        self._sizes: dict[str, int] = {}  # number of nodes by anchor, aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        anchor = str(event.anchor)
        if isinstance(event, yaml.AliasEvent):
            if anchor in self.anchors and anchor not in self._sizes:
                raise yaml.YAMLError(f"the alias *{truncate(anchor)} refers to a value that contains it{_line(event)}")
            self._count(self._sizes.get(anchor, 1), event)
            return super().compose_node(parent, index)
        before = self._nodes
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"values are nested more than {MAX_DEPTH} levels deep{_line(event)}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._sizes[anchor] = self._nodes - before
        return node

    def _count(self, nodes: int, event: yaml.Event) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise yaml.YAMLError(f"there are more than {MAX_NODES:,} values after expanding aliases{_line(event)}")

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
            tag = str(node.tag).rpartition(":")[2]
            raise yaml.YAMLError(f"{shown(node.value)} is not a valid {truncate(tag)}{_line(node)}") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):  # otherwise SafeLoader raises an error that names the node
            keys: set[str] = set()
            for key_node in (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    raise yaml.YAMLError(f"the key {shown(key)}{_line(key_node)} is not a string; put it in quotes")
                if key in keys:
                    raise yaml.YAMLError(f"the key {truncate(repr(key))} is duplicated{_line(key_node)}")
                keys.add(key)
        return super().construct_mapping(node, deep=deep)


def _unless_base_60(construct: Callable[[Any, yaml.ScalarNode], Any]) -> Callable[[Any, yaml.ScalarNode], Any]:
    return lambda loader, node: node.value if ":" in node.value else construct(loader, node)


_Loader.add_constructor("tag:yaml.org,2002:int", _unless_base_60(yaml.SafeLoader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _unless_base_60(yaml.SafeLoader.construct_yaml_float))


def _line(of: Any) -> str:
    return f" in line {of.start_mark.line + 1}" if of.start_mark else ""

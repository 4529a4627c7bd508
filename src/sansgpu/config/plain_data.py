"""Reads untrusted files with limits on size, nesting and file type, so that none can hang or exhaust memory."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ValidationError

from sansgpu.config.errors import ConfigError

MAX_RECORD_BYTES = 1 << 20  # maximum size of a JSON file that sansgpu wrote
MAX_TEXT_BYTES = 256 << 20  # the largest known tokenizer.json has 35 MB
MAX_JSON_BYTES = 32 << 20  # an index of 100,000 weights has 10 MB
MAX_DEPTH, MAX_VALUES = 32, 100_000  # levels of nesting and total values; a run's files need a tenth of each
MAX_SHOWN_CHARACTERS = 200  # messages cut longer values
MAX_REASON_CHARACTERS = 300  # a library's error may repeat a file's whole content
_MAX_INTEGER = 2**63 - 1
_SCALARS = (str, bool, int, float, date, time, type(None))


class InvalidDataError(ValueError):
    """A file has invalid text or values. The message is a clause that names the place in the file."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading.

    Raises InvalidDataError for a pipe, a device or a socket, which may never end, and OSError as `open` does.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would block otherwise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidDataError("it is a pipe, a device or a socket; give a regular file")
        yield file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Reads a regular file. Raises InvalidDataError if it exceeds `max_bytes`, and the errors of `open_regular`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InvalidDataError(f"it is larger than {max_bytes:,} bytes")
    return content


def require_regular_file(path: Path) -> None:
    """Raises ConfigError if `path` is a pipe, a device or a socket, from which reading may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is a pipe, a device or a socket; give a regular file or a folder.")


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text of a UTF-8 file. Raises ConfigError if it is unreadable, too large or not a regular file."""
    try:
        return read_regular(path, max_bytes).decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text (byte {error.start:,}).") from None
    except InvalidDataError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file. Raises ConfigError if it cannot be read or is not JSON."""
    try:
        return json.loads(read_text(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ConfigError like `read_json`, or if the value is not an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not keys and values.")
    return value


def read_validated(path: Path, schema: type[BaseModel], finite: bool = True) -> dict[str, Any]:
    """Reads a JSON object that sansgpu wrote, of at most `MAX_RECORD_BYTES`, and validates it with `schema`.

    Raises InvalidDataError naming the invalid field, and OSError if the file cannot be read.
    """
    value = parse_json(read_regular(path, MAX_RECORD_BYTES), finite)
    if flaw := field_flaw(schema, value):
        raise InvalidDataError(flaw)
    found: dict[str, Any] = value
    return found


def parse_json(text: str | bytes, finite: bool = True) -> Any:
    """Parses JSON. Raises InvalidDataError if it is invalid or contains values that `require_plain` rejects."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise InvalidDataError(f"values are nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise InvalidDataError(f"invalid JSON: {reason_of(error)}") from None
    require_plain(value, finite)
    return value


def require_plain(value: object, finite: bool = True) -> None:
    """Raises InvalidDataError naming the place of the first value that is not a scalar, list or mapping.

    Integers must fit into 64 bits, numbers must be finite unless `finite` is false, and strings must be Unicode without
    NUL characters.
    """
    left: list[tuple[tuple[object, ...], object]] = [((), value)]
    count = 0
    while left:
        path, value = left.pop()
        count += 1
        if count > MAX_VALUES:
            raise InvalidDataError(f"there are more than {MAX_VALUES:,} values")
        if len(path) > MAX_DEPTH:
            raise InvalidDataError(f"{named(path[:3])} is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str) or _text_flaw(key):
                    raise InvalidDataError(
                        f"the key {shown(key)}{_inside(path)} is {_text_flaw(key) or 'not a string'}"
                    )
                left.append(((*path, key), inner))
        elif isinstance(value, list):
            left += (((*path, number), inner) for number, inner in enumerate(value))
        elif why := _scalar_flaw(value, finite):
            raise InvalidDataError(f"{named(path) or 'the value'} is {why}")


def _scalar_flaw(value: object, finite: bool) -> str | None:
    if isinstance(value, str):
        return _text_flaw(value)
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return "an integer of more than 64 bits"
    if finite and isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is not a finite number"
    if not isinstance(value, _SCALARS):
        return f"a {type(value).__name__}; write a number, a string, a list or a mapping"
    return None


def _text_flaw(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    if "\0" in value:
        return "a string with the character NUL"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "a string with half a surrogate pair, which is not a Unicode character"
    return None


def field_flaw(schema: type[BaseModel], value: object) -> str | None:
    """Returns a clause naming the first field of `value` that `schema` rejects, or None."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        kind, place, given = first["type"], named(first["loc"]), shown(first["input"])
        if kind == "missing":
            return f"{place} is missing"
        if first["loc"] and first["loc"][0] not in schema.model_fields:  # pydantic would list every type
            return f"{named(first['loc'][:1])} is {given}, but numbers should be finite and have at most 64 bits"
        if kind in ("model_type", "dict_type"):
            return f"{place or 'it'} is {given}, but should contain keys and values"
        return f"{place} is {given}, but should be {first['msg'].removeprefix('Input should be ')}"
    return None


def named(place: tuple[object, ...]) -> str:
    """Formats a path to a nested value, e.g. `training.report_to.0`."""
    return truncate(".".join(map(str, place)))


def _inside(place: tuple[object, ...]) -> str:
    return f" in {named(place)}" if place else ""


def shown(value: object) -> str:
    """Formats a value as JSON for a message, truncated to `MAX_SHOWN_CHARACTERS`."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARACTERS + 1]
    try:
        return truncate(json.dumps(value, default=str))
    except (ValueError, TypeError, RecursionError):  # an integer of thousands of digits, a recursive list
        return f"a {type(value).__name__} that cannot be shown"


def truncate(text: str, max_characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """Truncates text to `max_characters` and adds an ellipsis."""
    return text if len(text) <= max_characters else text[:max_characters] + "..."


def first_line(error: BaseException) -> str:
    """Returns the truncated first line of a library's error without its period, or the error's type if it is empty."""
    lines = str(error).strip().splitlines()
    return truncate(lines[0], MAX_REASON_CHARACTERS).removesuffix(".") if lines else type(error).__name__


def reason_of(error: Exception) -> str:
    """Returns a parser's message on one line."""
    if "sys.set_int_max_str_digits" in str(error):  # Python's message is meant for programmers
        return "it holds an integer of more than 64 bits"
    return " ".join(str(error).split())

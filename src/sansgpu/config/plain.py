"""Reading files that anyone may have written, with bounds on size, depth and kind: none can hang or fill memory."""

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

MOST_BYTES = 1 << 20  # the largest JSON file that is read
MOST_DEPTH, MOST_VALUES = 32, 100_000  # levels of nesting, and values in all; a run's files need a tenth of either
SHOWN_CHARACTERS = 200  # messages show at most this many characters of a value
REASON_CHARACTERS = 300  # and of what a library says, which may repeat a file's whole content
_LARGEST = 2**63 - 1
_SCALARS = (str, bool, int, float, date, time, type(None))


class FlawError(ValueError):
    """A file's text or values cannot be used. The message is a clause that names the place in the file."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading. A pipe, a device or a socket, which may never end, is refused.

    Raises FlawError there, and OSError as `open` does.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait for a writer
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FlawError("it is a pipe, a device or a socket; give a regular file")
        yield file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises FlawError if it is longer, or as `open_regular` does."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise FlawError(f"it is larger than {most_bytes:,} bytes")
    return content


def read_json(path: Path, schema: type[BaseModel], finite: bool = True) -> dict[str, Any]:
    """The object in a JSON file of at most `MOST_BYTES`, of which `schema` refuses no field.

    Raises FlawError, naming the field, where it is none, and OSError where it cannot be read.
    """
    value = parse_json(read_regular(path, MOST_BYTES), finite)
    if flaw := field_flaw(schema, value):
        raise FlawError(flaw)
    found: dict[str, Any] = value
    return found


def parse_json(text: str | bytes, finite: bool = True) -> Any:
    """The value of a JSON text. Raises FlawError where it is no JSON, or holds what `require_plain` refuses."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise FlawError(f"values are nested more than {MOST_DEPTH} levels deep") from None
    except ValueError as error:
        raise FlawError(f"no JSON: {reason_of(error)}") from None
    require_plain(value, finite)
    return value


def require_plain(value: object, finite: bool = True) -> None:
    """Raises FlawError, naming the place, unless every value is a scalar, a list or a mapping that JSON can express.

    Integers must fit into 64 bits, numbers be finite unless `finite` is false, and texts be Unicode without NUL.
    """
    left: list[tuple[tuple[object, ...], object]] = [((), value)]
    count = 0
    while left:
        place, value = left.pop()
        count += 1
        if count > MOST_VALUES:
            raise FlawError(f"there are more than {MOST_VALUES:,} values")
        if len(place) > MOST_DEPTH:
            raise FlawError(f"{named(place[:3])} is nested more than {MOST_DEPTH} levels deep")
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str) or _text_flaw(key):
                    raise FlawError(f"the key {shown(key)}{_inside(place)} is {_text_flaw(key) or 'no text'}")
                left.append(((*place, key), inner))
        elif isinstance(value, list):
            left += (((*place, number), inner) for number, inner in enumerate(value))
        elif why := _scalar_flaw(value, finite):
            raise FlawError(f"{named(place) or 'the value'} is {why}")


def _scalar_flaw(value: object, finite: bool) -> str | None:
    if isinstance(value, str):
        return _text_flaw(value)
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "an integer of more than 64 bits"
    if finite and isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is no finite number"
    if not isinstance(value, _SCALARS):
        return f"a {type(value).__name__}; write a number, a text, a list or a mapping"
    return None


def _text_flaw(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    if "\0" in value:
        return "a text with the character NUL"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "a text with half a surrogate pair, which is no Unicode character"
    return None


def field_flaw(schema: type[BaseModel], value: object) -> str | None:
    """A clause that names the first field of `value` that `schema` refuses; None if it refuses none."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        kind, place, given = first["type"], named(first["loc"]), shown(first["input"])
        if kind == "missing":
            return f"{place} is missing"
        if first["loc"] and first["loc"][0] not in schema.model_fields:  # pydantic says how it is no boolean, no ...
            return f"{named(first['loc'][:1])} is {given}, but numbers should be finite and have at most 64 bits"
        if kind in ("model_type", "dict_type"):
            return f"{place or 'it'} is {given}, but should hold keys and values"
        return f"{place} is {given}, but should be {first['msg'].removeprefix('Input should be ')}"
    return None


def named(place: tuple[object, ...]) -> str:
    """A place among nested values, as `training.report_to.0`."""
    return cut(".".join(map(str, place)))


def _inside(place: tuple[object, ...]) -> str:
    return f" in {named(place)}" if place else ""


def shown(value: object) -> str:
    """A value for a message: as JSON, cut after `SHOWN_CHARACTERS`."""
    if isinstance(value, str):
        value = value[: SHOWN_CHARACTERS + 1]
    try:
        return cut(json.dumps(value, default=str))
    except (ValueError, TypeError, RecursionError):  # an integer of thousands of digits, a recursive list
        return f"a {type(value).__name__} that cannot be shown"


def cut(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """The text, with an ellipsis after `most` characters."""
    return text if len(text) <= most else text[:most] + "..."


def first_line(error: BaseException) -> str:
    """The first line of a library's message, without its full stop and with an ellipsis after `REASON_CHARACTERS`.

    The error's type where it says nothing.
    """
    lines = str(error).strip().splitlines()
    return cut(lines[0], REASON_CHARACTERS).removesuffix(".") if lines else type(error).__name__


def reason_of(error: Exception) -> str:
    """A parser's message on one line."""
    if "sys.set_int_max_str_digits" in str(error):  # Python's own refusal, with advice for programmers
        return "it holds an integer of more than 64 bits"
    return " ".join(str(error).split())

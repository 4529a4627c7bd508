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

from sansgpu.config.errors import ConfigError
from sansgpu.config.wording import shown, truncate

MAX_RECORD_BYTES = 1 << 20  # maximum size of a JSON file that sansgpu wrote
MAX_TEXT_BYTES = 256 << 20  # the largest known tokenizer.json has 35 MB
MAX_DEPTH, MAX_VALUES = 32, 100_000  # levels of nesting and total values; a run's files need a tenth of each
_MAX_INTEGER = 2**63 - 1
_SCALARS = (str, bool, int, float, date, time, type(None))


class InvalidDataError(ValueError):
    """A file has invalid text or values. The message is a clause that names the place in the file."""


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Returns the error for a file that the operating system refuses to open or read."""
    reason = error.strerror or str(error)
    return ConfigError(
        f"{truncate(str(path))} cannot be read: {reason}; check that it exists and that you may read it."
    )


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading.

    Raises InvalidDataError for a pipe, a device or a socket, which may never end, and OSError as `open` does.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would block otherwise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidDataError("it is a pipe, a device or a socket; pass a regular file")
        yield file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Reads a regular file. Raises InvalidDataError if it exceeds `max_bytes`, and the errors of `open_regular`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InvalidDataError(f"it is larger than {max_bytes:,} bytes")
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text of a UTF-8 file. Raises ConfigError if it is unreadable, too large or not a regular file."""
    try:
        return read_regular(path, max_bytes).decode()
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} cannot be read: it is not UTF-8 text (byte {error.start:,}); convert it to UTF-8."
        ) from None
    except InvalidDataError as error:
        raise ConfigError(f"{path} cannot be read: {error}; replace the file.") from None


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
        return "a string with an unpaired surrogate, which is not valid text"
    return None


def named(place: tuple[object, ...]) -> str:
    """Formats a path to a nested value, e.g. `training.report_to.0`."""
    return truncate(".".join(map(str, place)))


def _inside(place: tuple[object, ...]) -> str:
    return f" in {named(place)}" if place else ""


def reason_of(error: Exception) -> str:
    """Returns a parser's message on one line."""
    if "sys.set_int_max_str_digits" in str(error):  # Python's message is meant for programmers
        return "it contains an integer of more than 64 bits"
    return " ".join(str(error).split())

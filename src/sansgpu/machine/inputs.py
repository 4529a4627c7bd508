"""Reads untrusted files with limits, so that none can hang the process or exhaust its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.plain_data import InvalidDataError, read_regular

MAX_TEXT_BYTES = 256 << 20  # the largest known tokenizer.json has 35 MB
MAX_JSON_BYTES = 32 << 20  # an index of 100,000 weights has 10 MB


def require_regular_file(path: Path) -> None:
    """Raises ConfigError if `path` is a pipe, a device or a socket, from which reading may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is a pipe, a device or a socket; give a regular file or a folder.")


def read_text(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text of a UTF-8 file. Raises ConfigError if it is unreadable, too large or not a regular file."""
    try:
        return read_regular(path, most_bytes).decode()
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

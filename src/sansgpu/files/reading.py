"""Reads untrusted JSON files with limits on size, nesting and file type, so that none can hang or exhaust memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sansgpu.config.errors import ConfigError
from sansgpu.config.plain_data import MAX_RECORD_BYTES, InvalidDataError, named, parse_json, read_regular, read_text
from sansgpu.config.wording import shown

MAX_JSON_BYTES = 32 << 20  # an index of 100,000 weights has 10 MB
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the start of a pointer (github.com/git-lfs/git-lfs)


def require_regular_file(path: Path) -> None:
    """Raises ConfigError if `path` is a pipe, a device or a socket, from which reading may never end.

    Raises it for a Git LFS pointer, too: a text file that only names the file to download.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is a pipe, a device or a socket; pass a regular file or a folder.")
    if path.is_file() and _starts_with(path, _LFS_POINTER):
        raise ConfigError(
            f"{path} is not the file itself, but a Git LFS pointer to it; run `git lfs pull` in its folder, or "
            "download the file again."
        )


def _starts_with(path: Path, start: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False  # whoever reads the file reports the error


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file. Raises ConfigError if it cannot be read or is not JSON."""
    try:
        return json.loads(read_text(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}); correct it, or download or export it again."
        ) from None


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ConfigError like `read_json`, or if the value is not an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} contains a value of type {type(value).__name__} instead of keys and values; correct it, or "
            "download or export it again."
        )
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


def field_flaw(schema: type[BaseModel], value: object) -> str | None:
    """Returns a clause naming the first field of `value` that `schema` rejects, or None."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        error_type, place, given = first["type"], named(first["loc"]), shown(first["input"])
        if error_type == "missing":
            return f"{place} is missing"
        if first["loc"] and first["loc"][0] not in schema.model_fields:  # pydantic would list every type
            return f"{named(first['loc'][:1])} is {given}, but numbers must be finite and have at most 64 bits"
        if error_type in ("model_type", "dict_type"):
            return f"{place or 'it'} is {given}, but must contain keys and values"
        return f"{place} is {given}, but must be {first['msg'].removeprefix('Input should be ')}"
    return None

"""Odd values that no field expects, and random changes to files and JSON values."""

from __future__ import annotations

import copy
import json
import random
from typing import Any


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


ODD: list[Any] = [
    "text", "", " ", "\u2028", "\x1b[31mred\x07", "½", "²", "x" * 5000, "\ud800", "1e5", "12", "../up", "a/b\nc",
    "a\0b", "~nosuchuser/x", "<b>&amp;`|", "/dev/null", "/dev/zero", "$HOME", "{{ 7 * 7 }}",
    -1, 0, 1, 3, 2**31, 2**32, 2**63, 10**19, 10**400, 0.5, -0.5,
    1e308, 1e-320, float("nan"), float("inf"), -float("inf"), None, True, False, [], [1], ["a"], [[]], {}, {"a": 1},
    {"": None}, [None], _deep(5), _deep(200), list(range(3000)),
]  # fmt: skip
NOT_UTF8 = "caf\udce9"  # the bytes b"caf\xe9" in an argument or a file name
TEXTS = [value for value in ODD if isinstance(value, str) and "\0" not in value and value != "\ud800"] + [NOT_UTF8]
NUMBERS = [
    "-1",
    "0",
    "1",
    "2",
    "0.5",
    "-0.5",
    "1000000",
    "4294967296",
    "1e308",
    "1e-320",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "9" * 30,
    "9" * 400,
    "9" * 5000,
    "abc",
    "",
    "²",
]


def odd(draw: random.Random) -> Any:
    """Draws a copy of one of the `ODD` values, because changing a shared list would alter other cases."""
    return copy.deepcopy(draw.choice(ODD))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of every inner value of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [] if not at else [at]
    for key, item in list(inner)[:200]:
        found += places(item, (*at, key))
    return found


def changed(value: Any, draw: random.Random) -> Any:
    """Returns a copy of a JSON value in which one to three values are replaced or deleted."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        every = places(value)
        if not every:
            return odd(draw)
        *path, last = draw.choice(every)
        inner = value
        for key in path:
            inner = inner[key]
        if draw.random() < 0.15:
            del inner[last]
        else:
            inner[last] = odd(draw)
    return value


def dumped(value: Any) -> str:
    """Formats as JSON, including NaN, unpaired surrogates and huge integers."""
    return json.dumps(value)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Cuts, flips, repeats or replaces bytes at random places."""
    found = content
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, size = draw.randrange(len(found) + 1), draw.choice((1, 1, 2, 8, 64))
        before, these, after = found[:at], found[at : at + size], found[at + size :]
        found = draw.choice(
            [
                before,
                before + after,
                before + draw.randbytes(size) + after,
                before + these * 3 + after,
                before + bytes(byte ^ 1 << draw.randrange(8) for byte in these[:1]) + these[1:] + after,
                before + b"\xff\xfe\x00\xe2\x80\xa8" + these + after,
            ]
        )
    return found

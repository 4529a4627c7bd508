"""Formats numbers, values and errors for messages."""

from __future__ import annotations

import json


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Formats a number of things, e.g. 1 thread, 2 threads or 3 batches. `plural` is for irregular nouns."""
    return f"{number:,} {noun if number == 1 else plural or _plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


MAX_SHOWN_CHARACTERS = 200  # longer values are truncated in messages


def shown(value: object) -> str:
    """Formats a value as JSON for a message, truncated to `MAX_SHOWN_CHARACTERS`."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARACTERS + 1]
    text = ""
    try:
        # In parts, so that only the beginning of a long list is formatted.
        for part in json.JSONEncoder(default=str).iterencode(value):
            text += part
            if len(text) > MAX_SHOWN_CHARACTERS:
                break
        return truncate(text)
    except (ValueError, TypeError, RecursionError):  # an integer of thousands of digits, a recursive list
        return f"a {type(value).__name__} that cannot be shown"


def truncate(text: str, max_characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """Truncates text to `max_characters` and adds an ellipsis."""
    return text if len(text) <= max_characters else text[:max_characters] + "..."


def first_line(error: BaseException) -> str:
    """Returns the truncated first line of a library's error without its period, or the error's type if it is empty."""
    lines = str(error).strip().splitlines()
    return truncate(lines[0], MAX_REASON_CHARACTERS).removesuffix(".") if lines else type(error).__name__


MAX_REASON_CHARACTERS = 300  # a library's error may repeat a file's whole content


def formatted(form: str, value: object) -> str:
    """Formats a value with the template `form`. A negative number that is rounded to 0 has no sign."""
    text = form.format(value)
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


def count(number: float) -> str:
    """Formats a count, e.g. 25.1M."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Formats a duration, e.g. 2 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

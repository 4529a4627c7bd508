"""Text for a terminal, without the characters that would control it.

File names, dataset names, keys, messages and generated texts may hold anything: an escape sequence could rewrite what
is on the screen, and a change of direction could show another name than the true one.
"""

from __future__ import annotations

import re

# C0 and C1 controls except tabs and line ends, changes of direction (Unicode TR 36), and bytes that are no UTF-8.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
_LINE_ENDS = re.compile("[\r\n\u2028\u2029]")


def printable(text: str) -> str:
    """`text` with control characters written out, such as \\x1b; tabs and line ends stay."""
    return text if text.isascii() and text.isprintable() else _CONTROLS.sub(_written_out, text)


def printable_line(text: str) -> str:
    """The same on one line: line ends are written out, too."""
    return _LINE_ENDS.sub(_written_out, printable(text))


def printable_json(text: str) -> str:
    """Lines of JSON with the same values, whose control characters are written as JSON's escapes.

    JSON has controls in strings alone, and escapes those below 32 itself.
    """
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

"""Escapes control characters in text for a terminal, and markup in text for a Markdown file.

File names, dataset names, keys, messages and generated text are untrusted. An escape sequence could rewrite the screen,
and a change of text direction could disguise a name.
"""

from __future__ import annotations

import codecs
import re

# C0 and C1 controls except tabs and line ends, bidirectional controls (Unicode TR 36), and surrogates of invalid UTF-8.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
_LINE_ENDS = re.compile("[\r\n\u2028\u2029]")
_NOT_PRINTABLE_ASCII = re.compile("[^\n -~]")
_MARKUP = re.compile(r"[\\`*\[\]<>&|]")  # characters with a meaning in HTML or Markdown

SUBSTITUTE = "sansgpu.substitute"  # error handler of encodings: writes what an encoding lacks in ASCII, or as ?
_IN_ASCII = {"⟦": "[[", "⟧": "]]"}


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_IN_ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error(SUBSTITUTE, _substitute)


def encodable(text: str, encoding: str) -> str:
    """Replaces the characters that an encoding such as cp1252 lacks."""
    return text if text.isascii() else text.encode(encoding, SUBSTITUTE).decode(encoding)


def printable(text: str) -> str:
    """Replaces control characters with escapes such as \\x1b; keeps tabs and line ends."""
    return text if text.isascii() and text.isprintable() else _CONTROLS.sub(_escape, text)


def printable_line(text: str) -> str:
    """Replaces control characters and line ends with escapes."""
    return _LINE_ENDS.sub(_escape, printable(text))


def printable_json(text: str, encoding: str | None = None) -> str:
    """Replaces control characters in lines of JSON with JSON escapes, which leaves the values unchanged.

    Also replaces all but ASCII if the `encoding` of the stream is not UTF-8, which readers of JSON expect. Such
    characters occur only in strings of JSON, and control characters below 32 are already escaped there.
    """
    is_utf8 = codecs.lookup(encoding or "utf-8").name == "utf-8"
    return (_CONTROLS if is_utf8 else _NOT_PRINTABLE_ASCII).sub(_escape_in_json, text)


def as_text(text: str) -> str:
    """Formats a name or a recorded value for Markdown, so that its HTML and Markdown are shown, not rendered."""
    return _MARKUP.sub(r"\\\g<0>", printable_line(text))


def as_code(text: str) -> str:
    """Formats a name as inline code for Markdown."""
    inside = printable_line(text).replace("`", "'")
    return f"`{inside}`"


def _escape_in_json(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

"""Cleans text: spaces, and characters that are not text."""

from __future__ import annotations

import re

BULLETS = ("•", "◦", "▪", "‣", "–", "—", "-", "*", "·", "\uf0b7")
# Control characters, soft hyphens, zero-width spaces, byte order marks, and what is no character in Unicode.
_NOT_TEXT = re.compile("[\0-\x08\x0b-\x1f\x7f\u00ad\u200b\ufeff\ufffe\uffff\ud800-\udfff]")
_SPACES = re.compile(r"[ \t\n\r\f\u00a0]+")
_EMPTY_LINES = re.compile(r"\n{3,}")


def without_controls(text: str) -> str:
    """Removes characters that are not text, except tabs and newlines."""
    return _NOT_TEXT.sub("", text)


def collapsed(text: str) -> str:
    """Returns a text with single spaces and without line ends, as browsers show it."""
    return without_controls(_SPACES.sub(" ", text))


def cleaned(text: str) -> str:
    """Removes characters that are not text, spaces at the ends of lines, and all but one of several empty lines."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return _EMPTY_LINES.sub("\n\n", "\n".join(without_controls(line).rstrip() for line in lines)).strip("\n")

"""Reads the small files in which the kernel reports its state."""

from __future__ import annotations

from pathlib import Path


def kernel_text(path: Path) -> str:
    """Returns the text of a file without surrounding white space, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def kernel_number(path: Path) -> int | None:
    """Returns the integer at the start of a file, or None if there is none."""
    word = next(iter(kernel_text(path).split()), "")
    return int(word) if word.lstrip("-").isdecimal() else None

"""What a model needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class TextCodec(Protocol):
    """Text <-> ids; `data.tokenizer.Tokenizer` is one."""

    end_id: int
    before: tuple[int, ...]  # ids that come before a text

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""

    def save(self, folder: Path) -> None:
        """Write it as transformers reads it."""

"""The interface of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class TextCodec(Protocol):
    """A tokenizer; implemented by `data.tokenizer.Tokenizer`."""

    end_id: int
    prefix_ids: tuple[int, ...]  # ids to prepend to a text

    def encode(self, text: str) -> list[int]:
        """Converts text to ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Converts ids to text."""

    def save(self, folder: Path) -> None:
        """Writes the files from which transformers loads the tokenizer."""

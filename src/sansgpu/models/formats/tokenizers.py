"""The interfaces of tokenizers for generation and export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError


class TextCodec(Protocol):
    """The interface of a tokenizer, which `data.tokenizer.Tokenizer` implements."""

    end_id: int
    prefix_ids: tuple[int, ...]  # ids to add at the start of a text
    other_end_ids: tuple[int, ...]  # more tokens at which the model ends a text
    stops: tuple[str, ...]  # texts at which the model ends a text

    def encode(self, text: str) -> list[int]:
        """Converts text to ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Converts ids to text."""

    def save(self, folder: Path) -> None:
        """Writes the files from which transformers loads the tokenizer."""


@dataclass(frozen=True)
class TokenizerParts:
    """The content of a tokenizer.json, its special tokens and its chat template.

    If `begins`, the tokenizer adds `bos_id` at the start of each text. An answer of the chat template ends with the
    token `turn_end_id`, or if that is None, with the text `turn_end`.
    """

    json: str
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    begins: bool
    chat_template: str | None = None
    turn_end_id: int | None = None
    turn_end: str = ""
    other_end_ids: tuple[int, ...] = ()  # more tokens that end a text

    @property
    def end_ids(self) -> list[int]:
        """Returns the tokens that end a text."""
        known = dict.fromkeys((self.eos_id, self.turn_end_id, *self.other_end_ids))
        return [index for index in known if index is not None]

    @cached_property
    def backend(self) -> Backend:
        """The parsed tokenizer, which takes noticeable memory until this object is freed."""
        return Backend.from_str(self.json)

    def token(self, index: int | None) -> str | None:
        """Returns the text of a token, or None for None. Raises ConfigError if there is no such token."""
        if index is None:
            return None
        name = self.backend.id_to_token(index) if type(index) is int and 0 <= index < 1 << 32 else None
        if name is None:
            raise ConfigError(f"the tokenizer has no token {index}, which its settings name; correct its token ids.")
        return str(name)

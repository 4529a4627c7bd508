"""The interfaces of tokenizers for generation and export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError
from sansgpu.config.wording import shown


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
    """A tokenizer, its special tokens and its chat template.

    If `adds_bos`, the tokenizer adds `bos_id` at the start of each text. An answer of the chat template ends with the
    token `turn_end_id`, or if that is None, with the text `turn_end`.
    """

    backend: Backend
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    adds_bos: bool
    chat_template: str | None = None
    turn_end_id: int | None = None
    turn_end: str = ""
    other_end_ids: tuple[int, ...] = ()  # more tokens that end a text
    stored: Mapping[str, Any] | None = None  # the metadata of the GGUF file that has the same tokenizer

    @property
    def end_ids(self) -> list[int]:
        """Returns the tokens that end a text."""
        known = dict.fromkeys((self.eos_id, self.turn_end_id, *self.other_end_ids))
        return [index for index in known if index is not None]

    @cached_property
    def json(self) -> str:
        """The content of its tokenizer.json."""
        return str(self.backend.to_str())

    def token(self, index: int | None) -> str | None:
        """Returns the text of a token, or None for None. Raises ConfigError if there is no such token."""
        if index is None:
            return None
        name = self.backend.id_to_token(index) if type(index) is int and 0 <= index < 1 << 32 else None
        if name is None:
            raise ConfigError(f"the tokenizer has no token {index}, which its settings name; correct its token ids.")
        return str(name)


def with_rows(backend: Backend, rows: int, name: str, is_used: Callable[[str], bool]) -> Backend:
    """Returns a tokenizer whose tokens all have one of the `rows` of the embedding of the model called `name`.

    Removes special tokens without a row that the model does not use, such as Gemma 3's token for images. Raises
    ConfigError if another token has no row.
    """
    beyond = sorted((i, token) for token, i in backend.get_vocab(with_added_tokens=True).items() if i >= rows)
    if not beyond:
        return backend
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special -= backend.get_vocab(with_added_tokens=False).keys()
    for index, token in beyond:
        if token not in special or is_used(token):
            raise ConfigError(
                f"{name}: the tokenizer has {beyond[-1][0] + 1:,} tokens, but the model's embedding has {rows:,} rows, "
                f"so token {shown(token)} (id {index:,}) has none; remove it from tokenizer.json, or add rows with "
                "transformers' resize_token_embeddings."
            )
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < rows]
    return Backend.from_str(json.dumps(content))

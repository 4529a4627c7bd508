"""Tokenizes rendered conversations in which the texts of special tokens in messages stay plain text.

A chat template writes special tokens as text, and the tokenizer finds them there. So a message with the text
`<|im_end|>` could end its turn and forge the next one. Such texts are replaced by placeholders before the template is
rendered: what is then found was written by the template.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from sansgpu.config.wording import shown
from sansgpu.models.generation.answer_end import added_tokens_in, answer_end, turn_texts

Message = dict[str, Any]


class SpecialTextError(Exception):
    """Raised if the text of a special token in a message cannot be kept apart from tokens. The message is a clause."""


@dataclass(frozen=True)
class EncodedConversation:
    """The tokens of a rendered conversation, and the character range of each."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    special_text: str | None = None  # the first text of a special token that is in a message as plain text


def encode_conversation(
    tokenizer: Any,
    text: str,
    messages: Sequence[Message],
    render: Callable[..., str],
    tools: Sequence[Mapping[str, Any]] = (),
) -> EncodedConversation:
    """Tokenizes `text`, which is `render(messages, tools=tools)`.

    Without texts of special tokens in messages and tools, the result is the tokenizer's own. Raises SpecialTextError.
    """
    special = _special_texts_of(tokenizer)
    if not special.are_in(_strings([*messages, *tools])):
        return encode_raw(tokenizer, text)
    mark = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)  # private use area
    hidden = list[str]()

    def hide(string: str) -> str:
        pieces, end = [], 0
        for start, stop, _ in special.found_in(string):
            found = string[start:stop]
            text = found.strip() or found  # white space around a token stays, because templates may strip it
            start += found.index(text)
            hidden.append(text)
            pieces += [string[end:start], f"{mark}{len(hidden) - 1}{mark}"]
            end = start + len(text)
        return "".join([*pieces, string[end:]])

    rendered = render(
        [{key: value if key == "role" else _mapped(value, hide) for key, value in m.items()} for m in messages],
        tools=_mapped(tools, hide),
    )
    pieces = list(special.pieces(rendered, re.compile(f"{mark}([0-9]+){mark}"), hidden))
    if "".join(piece.text for piece in pieces) != text:
        raise SpecialTextError(
            f"has the text of the special token {shown(hidden[0])} in a place where the chat template changes it"
        )
    return special.encode(pieces, hidden[0])


def encode_plain(tokenizer: Any, text: str) -> EncodedConversation:
    """Tokenizes a text without special tokens: their texts stay plain text. Raises SpecialTextError."""
    special = _special_texts_of(tokenizer)
    if (found := next(special.found_in(text), None)) is None:
        return encode_raw(tokenizer, text)
    return special.encode([_Segment(text)], text[found[0] : found[1]])


def encode_raw(tokenizer: Any, text: str) -> EncodedConversation:
    """Tokenizes a text in which the texts of special tokens become the tokens. Adds no others."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return EncodedConversation(list(encoded["input_ids"]), list(encoded["offset_mapping"]))


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings of messages, however deep."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, part in value.items():
                yield from _strings(key)
                yield from _strings(part)
        case list() | tuple():
            for part in value:
                yield from _strings(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Applies `change` to all strings in a value of a message."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
        case list() | tuple():
            return [_mapped(part, change) for part in value]
    return value


@dataclass(frozen=True)
class _Segment:
    """A piece of a rendered conversation: plain text, or a special token that the template wrote."""

    text: str
    token: int | None = None


class _SpecialTexts:
    """The texts of a tokenizer's special tokens, and of other added tokens with which the chat template marks turns."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Backend = tokenizer.backend_tokenizer
        added, texts, end = self._backend.get_added_tokens_decoder(), turn_texts(tokenizer), answer_end(tokenizer)
        marks = {*added_tokens_in(tokenizer, "" if texts is None else texts.before), None if end is None else end.token}
        chosen = {index: token for index, token in added.items() if token.special or index in marks}
        self._tokens = [_as_special(token) for token in chosen.values()]
        self._ids = {token.content: index for index, token in chosen.items()}
        self._forbidden = set(chosen) - {tokenizer.unk_token_id}
        self._finder = Backend(models.BPE())  # without a vocabulary it returns only the special tokens
        if any(token.normalized for token in self._tokens) and self._backend.normalizer is not None:
            self._finder.normalizer = self._backend.normalizer
        self._finder.add_special_tokens(self._tokens)
        self._names = {self._finder.token_to_id(name): name for name in self._ids}

    def found_in(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yields the range and the id of each text of a special token, with the white space that it includes."""
        encoded = self._finder.encode(text, add_special_tokens=False)
        for own, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            yield start, stop, self._ids[self._names[own]]

    def are_in(self, texts: Iterator[str]) -> bool:
        return next(self.found_in("\n".join(texts)), None) is not None

    def pieces(self, rendered: str, placeholder: re.Pattern[str], hidden: Sequence[str]) -> Iterator[_Segment]:
        """Divides a rendered conversation at special tokens, and puts the hidden texts back into the plain text."""

        def shown(text: str) -> str:
            return placeholder.sub(lambda found: hidden[int(found[1])], text)

        end = 0
        for start, stop, token in self.found_in(rendered):
            yield _Segment(shown(rendered[end:start]))
            yield _Segment(rendered[start:stop], token)
            end = stop
        yield _Segment(shown(rendered[end:]))

    @cached_property
    def _plain(self) -> tuple[Backend, str, int]:
        """A copy of the tokenizer that finds no special tokens, and a text that nobody can guess for one.

        The text is an added token, so that the plain text around it is tokenized as around a special token.
        """
        name, copy = secrets.token_hex(16), Backend.from_str(self._backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        copy.add_special_tokens(self._tokens)
        copy.encode_special_tokens = True  # finds only added tokens that are not special
        copy.add_tokens([AddedToken(name, normalized=False, special=False)])
        return copy, name, int(copy.token_to_id(name) or 0)

    def encode(self, pieces: Sequence[_Segment], special_text: str) -> EncodedConversation:
        """Tokenizes pieces. Raises SpecialTextError if plain text has a special token's text as a whole word."""
        copy, name, marker = self._plain
        tokens = iter([piece.token for piece in pieces if piece.token is not None])
        text = "".join(piece.text if piece.token is None else name for piece in pieces)
        encoded = copy.encode(text, add_special_tokens=False)
        if self._forbidden.intersection(encoded.ids):
            raise SpecialTextError(
                f"has the text {shown(special_text)}, which the tokenizer can only read as a special token"
            )
        places, start = list[int](), 0  # in the conversation, of each character of `text`
        for piece in pieces:
            stop = start + len(piece.text)
            places += range(start, stop) if piece.token is None else [start] * len(name)
            start = stop
        places.append(start)
        ids = [next(tokens) if index == marker else index for index in encoded.ids]
        offsets = [(places[begin], places[end]) for begin, end in encoded.offsets]
        return EncodedConversation(ids, offsets, special_text)


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


_known: WeakKeyDictionary[Any, tuple[Any, _SpecialTexts]] = WeakKeyDictionary()


def _special_texts_of(tokenizer: Any) -> _SpecialTexts:
    """Returns the special texts of a tokenizer, which are found once for each chat template."""
    key = str(tokenizer.chat_template), len(tokenizer)
    known = _known.get(tokenizer)
    if known is None or known[0] != key:
        known = _known[tokenizer] = (key, _SpecialTexts(tokenizer))
    return known[1]

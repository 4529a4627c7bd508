"""Tokenizes conversations and builds their loss masks, in which only assistant turns are targets.

The targets of an assistant turn are the tokens that the model has to generate: everything after the header, which the
generation prompt contains, up to and including the token that ends the turn.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.data.forms.chats import CONVERSATIONS, Conversation, ConversationOptions
from sansgpu.data.rows import BadRowError, SourceRow, bad_row
from sansgpu.data.tokenizer import bytes_between, special_tokens_around, token_bytes
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.generation.special_texts import (
    EncodedConversation,
    SpecialTextError,
    encode_conversation,
    encode_plain,
    encode_raw,
)
from sansgpu.tasks.sft.notes import ReadingNotes
from sansgpu.tasks.sft.rendering import RenderedConversation

DEFAULTS = ConversationOptions()


@dataclass(frozen=True)
class MaskedConversation:
    """Token ids, the loss mask `learned` (the first token is never a target, even if True), UTF-8 bytes per token."""

    ids: list[int]
    learned: list[bool]
    sizes: list[int] = field(default_factory=list, compare=False)
    lacks_system: bool = False  # the chat template omitted the system message
    special_text: str | None = field(default=None, compare=False)  # a special token's text in a message, kept as text
    omitted: tuple[str, ...] = ()  # names of other parts that the chat template omitted
    lost_thoughts: int = field(default=0, compare=False)  # turns whose thoughts the chat template omitted


@dataclass(frozen=True)
class TokenizedConversations:
    """N concatenated examples."""

    tokens: np.ndarray  # (T,) int32
    learned: np.ndarray  # (T,) bool
    offsets: np.ndarray  # (N + 1,) int64
    learned_bytes: np.ndarray  # (N,) int64: UTF-8 bytes of the target tokens, without special tokens

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids (L,) int32 and the loss mask (L,) bool of one example."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        return self.tokens[start:stop], self.learned[start:stop]

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each example, (N,) int64."""
        return np.diff(self.offsets)


def tokenize_conversations(
    rows: Iterable[SourceRow],
    tokenizer: Any,
    max_length: int,
    long_rows: Literal["truncate", "drop"],
    notes: ReadingNotes,
    options: ConversationOptions = DEFAULTS,
) -> TokenizedConversations:
    """Tokenizes `rows` in order.

    Counts rows in `notes`, whose `bad_rows` handles invalid ones. Raises ConfigError if the tokenizer is unsuitable.
    """
    tokens, learned, offsets, sizes = array("i"), array("b"), array("q", [0]), array("q")
    is_text_token = token_bytes(tokenizer.backend_tokenizer) > 0
    if tokenizer.unk_token_id is not None:
        is_text_token[tokenizer.unk_token_id] = True

    def fit(row: SourceRow) -> tuple[MaskedConversation | None, bool]:
        with tokenizer_errors(row.where):
            conversation = options.applied(CONVERSATIONS.read(row, options.columns, notes.bad_rows))
            notes.from_marks += bool(conversation.turns and conversation.text and tokenizer.chat_template is not None)
            return mask_within(conversation, tokenizer, max_length, long_rows)

    for fitted, is_shortened in notes.bad_rows.parsed(rows, fit):
        if fitted is None:
            notes.dropped += 1
            continue
        notes.shortened += is_shortened
        notes.count(fitted.special_text, fitted.lacks_system, fitted.omitted)
        notes.count_thoughts(fitted.lost_thoughts)
        tokens.extend(fitted.ids)
        learned.extend(fitted.learned)
        offsets.append(len(tokens))
        counted = is_text_token[fitted.ids[1:]] & np.array(fitted.learned[1:])
        sizes.append(int(np.array(fitted.sizes[1:])[counted].sum()))
    arrays = np.array(tokens, np.int32), np.array(learned, np.bool_), np.array(offsets, np.int64)
    return TokenizedConversations(*arrays, np.array(sizes, np.int64))


def mask_within(
    conversation: Conversation, tokenizer: Any, max_length: int, long_rows: Literal["truncate", "drop"]
) -> tuple[MaskedConversation | None, bool]:
    """Masks a conversation within `max_length` tokens; returns None if it is too long or has no target token.

    With "truncate", as few of the oldest turns as possible are removed from a long conversation, so that no question or
    answer is cut. A long text loses its beginning. Also returns whether the conversation was shortened.
    """
    conversation = conversation.for_template(tokenizer.chat_template is not None)
    masked = mask_conversation(conversation, tokenizer)
    is_long = len(masked.ids) > max_length
    if is_long and long_rows == "drop":
        return None, False
    if is_long and conversation.text is not None:
        end = slice(-max_length, None)
        masked = replace(masked, ids=masked.ids[end], learned=masked.learned[end], sizes=masked.sizes[end])
    elif is_long:

        def masked_from(question: int) -> MaskedConversation:
            return mask_conversation(conversation.from_question(question), tokenizer)

        questions = conversation.later_questions()
        first = bisect_left(questions, True, key=lambda question: len(masked_from(question).ids) <= max_length)
        if first == len(questions):
            return None, False
        masked = masked_from(questions[first])
    return (masked, is_long) if any(masked.learned[1:]) else (None, False)


def show_masked(ids: Sequence[int] | np.ndarray, learned: Sequence[bool] | np.ndarray, tokenizer: Any) -> str:
    """Returns the text of an example, including special tokens, with ⟦ and ⟧ around the target tokens."""
    parts = []
    for is_learned, run in groupby(zip(ids, learned, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode(
            [int(token) for token, _ in run], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        parts.append(f"⟦{text}⟧" if is_learned else text)
    return "".join(parts)


def mask_conversation(conversation: Conversation, tokenizer: Any) -> MaskedConversation:
    """Tokenizes a conversation and builds its loss mask. `tokenizer` must be a fast tokenizer of transformers.

    The texts of special tokens in messages stay plain text unless `conversation.parse_special`; a row's `text` is
    tokenized as it is. Raises BadRowError if the chat template rejects the conversation or a required template is
    missing, and ConfigError if the tokenizer is unsuitable.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError("the model's tokenizer has no tokenizer.json; convert it to a fast one with transformers.")
    conversation = conversation.for_template(tokenizer.chat_template is not None)
    if conversation.text is not None:
        return _mask_plain("", conversation.text, tokenizer, encode_raw)
    try:
        if tokenizer.chat_template is not None:
            return _mask_chat(conversation, tokenizer)
        if conversation.plain is not None:
            encode = encode_raw if conversation.parse_special else encode_plain
            masked = _mask_plain(*conversation.plain, tokenizer, encode)
            return replace(masked, omitted=("tools",)) if conversation.tools else masked
    except SpecialTextError as error:
        raise bad_row(conversation.where, str(error)) from None
    raise BadRowError(
        f"{conversation.where}: the model's tokenizer has no chat template; set data.chat_template to simple or "
        "to a Jinja file."
    )


Encode = Callable[[Any, str], EncodedConversation]


def _mask_plain(prompt: str, answer: str, tokenizer: Any, encode: Encode) -> MaskedConversation:
    """Returns [BOS] prompt, answer, EOS. Tokenizes the prompt separately, as in generation."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("the model's tokenizer has no end-of-text token; set eos_token in its tokenizer_config.json.")
    asked = encode(tokenizer, prompt) if prompt else EncodedConversation([], [])
    answered = _encode_continuation(answer, tokenizer, encode) if prompt else encode(tokenizer, answer)
    before, after = asked.ids, answered.ids
    sizes = bytes_between(answer, [stop for _, stop in answered.offsets]).tolist()
    begin = list(special_tokens_around(tokenizer.backend_tokenizer)[0])
    if (before or after)[: len(begin)] != begin:  # the text itself may already start with BOS
        before = begin + before
    if after[-1:] != [end]:
        after, sizes = [*after, end], [*sizes, 0]
    learned = [False] * len(before) + [True] * len(after)
    special_text = asked.special_text or answered.special_text
    return MaskedConversation(before + after, learned, [0] * len(before) + sizes, special_text=special_text)


def _encode_continuation(text: str, tokenizer: Any, encode: Encode) -> EncodedConversation:
    """Encodes a text that continues another one, without the space that SentencePiece adds before a first word."""
    newline, found = encode(tokenizer, "\n").ids, encode(tokenizer, "\n" + text)
    if newline and found.ids[: len(newline)] == newline:
        offsets = [(max(0, start - 1), max(0, stop - 1)) for start, stop in found.offsets[len(newline) :]]
        return replace(found, ids=found.ids[len(newline) :], offsets=offsets)
    return encode(tokenizer, text)


def _mask_chat(conversation: Conversation, tokenizer: Any) -> MaskedConversation:
    rendered = RenderedConversation(conversation, tokenizer)
    if conversation.parse_special:
        encoded = encode_raw(tokenizer, rendered.full)
    else:
        encoded = encode_conversation(tokenizer, rendered.full, conversation.turns, rendered.render, conversation.tools)
    offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    starts, stops = offsets[:, 0], offsets[:, 1]
    learned = np.zeros(len(starts), np.bool_)
    for start, stop in rendered.spans(stops):
        # A target token may start in the header: in `Answer: `, the space belongs to the token of the next word.
        visible = stop - len(rendered.full[start:stop].lstrip())
        learned |= (starts < stop) & ((starts >= start) & (stops > start) | (stops > visible))
    sizes = bytes_between(rendered.full, stops.tolist()).tolist()
    found = MaskedConversation(encoded.ids, learned.tolist(), sizes, rendered.lacks_system(), encoded.special_text)
    return replace(found, omitted=rendered.omitted(), lost_thoughts=rendered.lost_thoughts())

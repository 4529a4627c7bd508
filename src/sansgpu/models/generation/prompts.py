"""Encodes prompts and decodes generated tokens with a transformers tokenizer. Does not import transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.machine.untrusted.templates import UnusableTemplateError, render_prefixes, with_tools
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.generation.answer_end import end_tokens, stop_strings
from sansgpu.models.generation.generate import BatchModel, decoder_readers
from sansgpu.models.generation.special_texts import (
    EncodedConversation,
    SpecialTextError,
    encode_conversation,
    encode_raw,
)
from sansgpu.models.generation.template_variables import NO_VARIABLES, Variables, require_variables
from sansgpu.models.generation.tool_calls import adapted_to, special_tokens, tool_use


class RejectedConversationError(ConfigError):
    """Raised if a chat template refuses a conversation, but may accept others."""


def unchanged_template(template: str) -> str:
    return template


def prompt_ids(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Variables = NO_VARIABLES,
) -> list[int]:
    """Returns the ids of a conversation up to the model's answer; without a chat template, those of the last message.

    Raises ConfigError if the template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        return text_prompt_ids(tokenizer, messages[-1]["content"])
    return encoded_prompt(tokenizer, messages, tools=tools, variables=variables).ids


@tokenizer_errors()
def encoded_prompt(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    revise: Callable[[str], str] = unchanged_template,
    parse_special: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Variables = NO_VARIABLES,
) -> EncodedConversation:
    """Returns the tokens of a conversation up to the model's answer.

    `revise` may change the chat template, and `variables` are its variables for this conversation. Texts of special
    tokens in messages and tools stay plain text unless `parse_special`. Raises ConfigError if the template refuses the
    conversation.
    """
    render = partial(prompt_text, tokenizer, revise=revise, variables=variables)
    text = render(messages, tools=tools)
    try:
        if parse_special:
            found = encode_raw(tokenizer, text)
        else:
            found = encode_conversation(tokenizer, text, messages, render, tools)
    except SpecialTextError as error:
        raise ConfigError(f"a message {error}; remove it.") from None
    if not found.ids:
        raise ConfigError("the chat template produces no text for this conversation; choose a different chat template.")
    return found


def prompt_text(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    new_answer: bool = True,
    revise: Callable[[str], str] = unchanged_template,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Variables = NO_VARIABLES,
) -> str:
    """Returns the text of a conversation up to the model's answer.

    If `new_answer` is False, the last message is the beginning of the answer, and the text ends with it. Raises
    ConfigError if the chat template refuses the conversation, or if there is none.
    """
    if tokenizer.chat_template is None:
        raise ConfigError("the model has no chat template; set data.chat_template, or pass a text instead of messages.")
    require_variables(tokenizer, variables)
    try:
        template = revise(tokenizer.get_chat_template(tools=list(tools) or None))
        names = with_tools({**tokenizer.special_tokens_map, **variables}, tools)
        turns = adapted_to(template, tokenizer.special_tokens_map, messages)
        prompt = render_prefixes(template, names, turns, [(len(messages), new_answer)])[0]
    except (UnusableTemplateError, ValueError) as error:  # ValueError: several templates, but no default
        raise ConfigError(f"{first_line(error)}; choose a different chat template.") from None
    if prompt.refusal is not None:
        raise RejectedConversationError(
            f"the chat template rejects this conversation ({prompt.refusal}); change its turns, or choose a different "
            "chat template."
        )
    return prompt.text if new_answer else _through(prompt.text, messages[-1]["content"])


def _through(text: str, content: str) -> str:
    """Returns a rendered conversation up to the end of its last message, without what the template puts after it."""
    start = text.rfind(content.strip())
    if start < 0:
        raise ConfigError("the chat template changes the beginning of an answer; choose a different chat template.")
    whole = content.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else content.strip())]


def text_prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text, after the tokenizer's leading special tokens and without its trailing ones."""
    with tokenizer_errors():
        probe = tokenizer("a", return_special_tokens_mask=True)
        prefix = probe.input_ids[: (*probe.special_tokens_mask, 0).index(0)]
        ids = [*prefix, *tokenizer(text, add_special_tokens=False).input_ids]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ids or [first]


class TokenDecoder:
    """Decodes tokens of a tokenizer into text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _special(self) -> dict[int, str]:
        return special_tokens(self._tokenizer)

    def __call__(self, ids: list[int], marks: Collection[str] = ()) -> str:
        """Returns the text of tokens without special ones, except `marks`."""
        if not marks:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
        kept = [token for token in ids if token not in self._special or self._special[token] in marks]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))


def tokenizer_fields(tokenizer: Any, ends: Iterable[int]) -> dict[str, Any]:
    """Returns the fields of a BatchModel that depend on its tokenizer. `ends` are the model's end tokens."""
    return {
        "text_ids": partial(text_prompt_ids, tokenizer),
        "chat_ids": None if tokenizer.chat_template is None else partial(prompt_ids, tokenizer),
        "tool_use": None if tokenizer.chat_template is None else partial(tool_use, tokenizer),
        "decode": TokenDecoder(tokenizer),
        "ends": frozenset(end_tokens(tokenizer, ends).ids),
        "stops": stop_strings(tokenizer),
    }


def decoder_chat(model: TransformerLM, tokenizer: Any, ends: Iterable[int]) -> BatchModel:
    """Returns a `TransformerLM` with a transformers tokenizer as a BatchModel. `ends` are the model's end tokens."""
    return BatchModel(**decoder_readers(model), **tokenizer_fields(tokenizer, ends))

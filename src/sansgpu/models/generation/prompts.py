"""Encodes prompts and decodes generated tokens with a transformers tokenizer. Does not import transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.machine.untrusted.templates import UnusableTemplateError, render_prefixes
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.generation.generate import BatchModel, decoder_readers


@tokenizer_errors()
def prompt_ids(
    tokenizer: Any, messages: list[dict[str, Any]], revise: Callable[[str], str] = lambda template: template
) -> list[int]:
    """Returns the ids of a conversation up to the model's answer; without a chat template, those of the last message.

    `revise` may change the chat template. Raises ConfigError if the template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        return text_prompt_ids(tokenizer, messages[-1]["content"])
    try:
        template = revise(tokenizer.get_chat_template())
        prompt = render_prefixes(template, tokenizer.special_tokens_map, messages, [(len(messages), True)])[0]
    except (UnusableTemplateError, ValueError) as error:  # ValueError: several templates, but no default
        raise ConfigError(f"{first_line(error)}; choose a different chat template.") from None
    if prompt.refusal is not None:
        raise ConfigError(f"the chat template rejects this conversation: {prompt.refusal}.")
    if not (ids := list(tokenizer(prompt.text, add_special_tokens=False).input_ids)):
        raise ConfigError("the chat template produces no text for this conversation; choose a different chat template.")
    return ids


def text_prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text, after the tokenizer's leading special tokens and without its trailing ones."""
    with tokenizer_errors():
        probe = tokenizer("a", return_special_tokens_mask=True)
        prefix = probe.input_ids[: (*probe.special_tokens_mask, 0).index(0)]
        ids = [*prefix, *tokenizer(text, add_special_tokens=False).input_ids]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ids or [first]


def decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def decoder_chat(model: TransformerLM, tokenizer: Any) -> BatchModel:
    """Returns a `TransformerLM` with a transformers tokenizer as a BatchModel."""
    return BatchModel(
        **decoder_readers(model),
        text_ids=partial(text_prompt_ids, tokenizer),
        chat_ids=None if tokenizer.chat_template is None else partial(prompt_ids, tokenizer),
        decode=partial(decode, tokenizer),
        ends=frozenset({tokenizer.eos_token_id} - {None}),
    )

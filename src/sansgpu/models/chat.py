"""Chat and text generation with transformers models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from sansgpu.config import ConfigError
from sansgpu.config.plain_data import first_line
from sansgpu.machine.templates import UnusableTemplateError, render_prefixes
from sansgpu.machine.tokenizer_trial import tokenizer_errors
from sansgpu.models.generate import Sampling, reading, write
from sansgpu.models.unpadded import autocast_of

UNBOUNDED_CONTEXT = 4096  # tokens of context for models that declare no maximum


class PretrainedReader:
    """An IncrementalReader for a transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        text: Any = model.config.get_text_config()
        self.context = int(getattr(text, "max_position_embeddings", None) or UNBOUNDED_CONTEXT)
        self.reset()

    def reset(self) -> None:
        self._cache, self.length = DynamicCache(config=self._model.config), 0

    def forward_new(self, ids: list[int]) -> torch.Tensor:
        inputs = torch.tensor([ids], device=self._model.device)
        with autocast_of(self._model):
            output = self._model(inputs, past_key_values=self._cache, use_cache=True)
        self.length += len(ids)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


@tokenizer_errors()
def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Returns the prompt ids of a conversation; without a chat template, those of its last message.

    Raises ConfigError if the chat template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        return _encode_prompt(tokenizer, messages[-1]["content"])
    try:
        template = tokenizer.get_chat_template()
        prompt = render_prefixes(template, tokenizer.special_tokens_map, messages, [(len(messages), True)])[0]
    except (UnusableTemplateError, ValueError) as error:  # ValueError: several templates without a default
        raise ConfigError(f"{first_line(error)}; give the model another chat template.") from None
    if prompt.refusal is not None:
        raise ConfigError(f"the chat template refuses this conversation: {prompt.refusal}.")
    return list(tokenizer(prompt.text, add_special_tokens=False).input_ids)


def answer(
    model: PreTrainedModel, tokenizer: Any, messages: list[dict[str, str]], max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Streams the model's reply to a conversation, until it ends its turn or after `max_new_tokens`."""
    return _generate(model, tokenizer, prompt_ids(tokenizer, messages), max_new_tokens, sampling)


def continued(
    model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Streams the model's continuation of a text."""
    return _generate(model, tokenizer, _encode_prompt(tokenizer, prompt), max_new_tokens, sampling)


def _encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text with the tokenizer's leading special tokens, but without its trailing ones."""
    with tokenizer_errors():
        probe = tokenizer("a", return_special_tokens_mask=True)
        prefix = probe.input_ids[: (*probe.special_tokens_mask, 0).index(0)]
        ids = [*prefix, *tokenizer(text, add_special_tokens=False).input_ids]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ids or [first]


def _generate(
    model: PreTrainedModel, tokenizer: Any, ids: list[int], max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    eos: Any = getattr(model.generation_config, "eos_token_id", None)
    stop_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    with reading(model):
        yield from write(PretrainedReader(model), ids, stop_ids, decode, max_new_tokens, sampling)

"""Talking to a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from sansgpu.config import ConfigError
from sansgpu.config.plain import first_line
from sansgpu.machine.templates import UnusableTemplateError, render_prefixes
from sansgpu.machine.tokenizer_trial import tokenizer_errors
from sansgpu.models.generate import Sampling, reading, write
from sansgpu.models.unpadded import autocast_of

UNBOUNDED_CONTEXT = 4096  # of models that name no longest context


class PretrainedReader:
    """A model of transformers with its cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        text: Any = model.config.get_text_config()
        self.context = int(getattr(text, "max_position_embeddings", None) or UNBOUNDED_CONTEXT)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._cache, self.length = DynamicCache(config=self._model.config), 0

    def read(self, ids: list[int]) -> torch.Tensor:
        """Logits (V,) of the token behind `ids`."""
        inputs = torch.tensor([ids], device=self._model.device)
        with autocast_of(self._model):
            output = self._model(inputs, past_key_values=self._cache, use_cache=True)
        self.length += len(ids)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


@tokenizer_errors()
def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Ids of a conversation that the model is to go on with; without a chat template, of its last text alone.

    Raises ConfigError where the template refuses it.
    """
    if tokenizer.chat_template is None:
        return _begun(tokenizer, messages[-1]["content"])
    try:
        template = tokenizer.get_chat_template()
        asked = render_prefixes(template, tokenizer.special_tokens_map, messages, [(len(messages), True)])
    except (UnusableTemplateError, ValueError) as error:  # ValueError: several templates, none of them the default
        raise ConfigError(f"{first_line(error)}; give the model another chat template.") from None
    if asked[0].refusal is not None:
        raise ConfigError(f"the chat template refuses this conversation: {asked[0].refusal}.")
    return list(tokenizer(asked[0].text, add_special_tokens=False).input_ids)


def answer(
    model: PreTrainedModel, tokenizer: Any, messages: list[dict[str, str]], max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """What the model says next, in pieces, until it ends its turn or after `max_new_tokens`."""
    return _written(model, tokenizer, prompt_ids(tokenizer, messages), max_new_tokens, sampling)


def continued(
    model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """How the model goes on with a text."""
    return _written(model, tokenizer, _begun(tokenizer, prompt), max_new_tokens, sampling)


def _begun(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text to go on with: the special tokens that the tokenizer puts before a text, and the text's own."""
    with tokenizer_errors():
        probe = tokenizer("a", return_special_tokens_mask=True)
        before = probe.input_ids[: (*probe.special_tokens_mask, 0).index(0)]
        ids = [*before, *tokenizer(text, add_special_tokens=False).input_ids]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ids or [first]


def _written(
    model: PreTrainedModel, tokenizer: Any, ids: list[int], max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    listed: Any = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}

    def decode(written: list[int]) -> str:
        return str(tokenizer.decode(written, skip_special_tokens=True))

    with reading(model):
        yield from write(PretrainedReader(model), ids, ends, decode, max_new_tokens, sampling)

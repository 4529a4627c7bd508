"""Chat and text generation with transformers models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from sansgpu.config import ConfigError
from sansgpu.config.plain_data import first_line
from sansgpu.kernels.decoder_step import DecoderStep
from sansgpu.machine.templates import UnusableTemplateError, render_prefixes
from sansgpu.machine.tokenizer_trial import tokenizer_errors
from sansgpu.models.batched import PROMPT_TOKENS, BatchModel, BatchReader, OneByOne, SlotReader
from sansgpu.models.generate import Sampling, reading, write
from sansgpu.models.probes import autocast_of, close_outputs
from sansgpu.models.slots import SlotCache
from sansgpu.models.step_layers import pretrained_step
from sansgpu.models.unpadded import UnpaddedModel, logits_of

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
        for start in range(0, len(ids), PROMPT_TOKENS):
            inputs = torch.tensor([ids[start : start + PROMPT_TOKENS]], device=self._model.device)
            with autocast_of(self._model):
                options = {"past_key_values": self._cache, "use_cache": True}
                logits = logits_after(self._model, torch.tensor([inputs.shape[1] - 1]), input_ids=inputs, **options)
            self.length += inputs.shape[1]
        return logits[0]


class PretrainedSlots(SlotReader):
    """A BatchReader for a transformers model that uses our attention; see `slots_work`."""

    def __init__(self, unpadded: UnpaddedModel, slots: int, length: int, fused: DecoderStep | None = None) -> None:
        super().__init__(slots, length, fused)
        self._unpadded = unpadded

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        model = self._unpadded.model
        inputs = self._unpadded.packed_inputs(ids, positions, self.cache)
        with autocast_of(model):
            return logits_after(model, chosen, **inputs, past_key_values=_TransformersCache(self.cache), use_cache=True)

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model: Any = self._unpadded.model
        x = model.get_input_embeddings()(ids)
        return x, *model.base_model.rotary_emb(x.float(), positions[:, None])


class _TransformersCache(Cache):
    """A SlotCache for the layers of transformers."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(layers=[])
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.append(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def slots_work(unpadded: UnpaddedModel, fused: DecoderStep | None = None) -> bool:
    """Returns True if a model can read several sequences with one cache: if that gives the logits of separate passes.

    Models with sliding windows, recurrent state or frequencies that depend on the length cannot.
    """
    if not unpadded.has_plain_rows or unpadded.model.device.type != "cpu":
        return False
    model, tokens = unpadded.model, torch.arange(15) * 7 % unpadded.model.config.get_text_config().vocab_size
    first, second = tokens[:6].tolist(), tokens[6:].tolist()
    reader, last = PretrainedSlots(unpadded, 2, 32, fused), torch.tensor([-1])
    try:
        with torch.inference_mode(), autocast_of(model):
            expected = [logits_after(model, last, input_ids=torch.tensor([ids])) for ids in (first, second)]
            reader.add([first[:-1], second[:-1]])
            found = reader.step([first[-1], second[-1]])
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        return False
    return close_outputs(model, found.float(), torch.cat(expected).float())


def logits_after(model: PreTrainedModel, chosen: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Returns the logits (n, V) after the `chosen` ones of all tokens; those after others are not computed."""
    return logits_of(model, lambda states: states.flatten(0, 1)[chosen], **inputs)


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
    decode, ends = partial(_decode, tokenizer), _end_ids(model, tokenizer)
    with reading(model):
        yield from write(PretrainedReader(model), ids, ends, decode, max_new_tokens, sampling)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _end_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    eos: Any = getattr(model.generation_config, "eos_token_id", None)
    ends = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    return frozenset(end for end in ends if end is not None)


def pretrained_batch(unpadded: UnpaddedModel, tokenizer: Any) -> BatchModel:
    """Returns a transformers model and its tokenizer as a BatchModel."""
    model, fused = unpadded.model, pretrained_step(unpadded.model) if unpadded.has_plain_rows else None
    together = slots_work(unpadded, fused)
    if not together and fused is not None:  # its embeddings or its head are others
        together, fused = slots_work(unpadded), None

    def open_reader(slots: int, length: int) -> BatchReader:
        return PretrainedSlots(unpadded, slots, length, fused) if together else OneByOne(PretrainedReader(model))

    return BatchModel(
        open_reader,
        PretrainedReader(model).context,
        together,
        text_ids=partial(_encode_prompt, tokenizer),
        chat_ids=None if tokenizer.chat_template is None else partial(prompt_ids, tokenizer),
        decode=partial(_decode, tokenizer),
        ends=_end_ids(model, tokenizer),
    )

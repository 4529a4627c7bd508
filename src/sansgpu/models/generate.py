"""Sampling with a key-value cache, as a stream of text."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.text import TextCodec

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. `temperature` 0 takes the likeliest."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def require_possible(sampling: Sampling) -> None:
    """Raises ConfigError where it cannot be followed."""
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ConfigError("--temperature and --top-k must not be negative, and --top-p must be in (0, 1].")


class Reader(Protocol):
    """A model that reads a text token by token, and keeps what it has read."""

    @property
    def context(self) -> int:
        """Tokens it can look back on."""

    @property
    def length(self) -> int:
        """Tokens read so far."""

    def forget(self) -> None:
        """Begin anew."""

    def read(self, ids: list[int]) -> torch.Tensor:
        """Logits (V,) of the token behind `ids`, which continue what was read before."""


class DecoderReader:
    """Our decoder with its key-value caches."""

    def __init__(self, model: TransformerLM) -> None:
        self._model, self.context = model, model.config.max_seq_len
        self.forget()

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self._caches[0].length

    def forget(self) -> None:
        """Begin anew."""
        self._caches = self._model.new_caches(1)

    def read(self, ids: list[int]) -> torch.Tensor:
        """Logits (V,) of the token behind `ids`."""
        inputs = torch.tensor([ids], device=self._model.embedding.weight.device)
        hidden = self._model.hidden(inputs, caches=self._caches)[0, -1]
        return hidden @ self._model.head_weight.T


def generate(
    model: TransformerLM, tokenizer: TextCodec, prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Yields text until the end-of-text token or `max_new_tokens`; the prompt begins a document, as in training."""
    ids = [*tokenizer.before, *tokenizer.encode(prompt)] or [tokenizer.end_id]
    with reading(model):
        yield from write(DecoderReader(model), ids, {tokenizer.end_id}, tokenizer.decode, max_new_tokens, sampling)


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def write(
    reader: Reader,
    ids: list[int],
    ends: Container[int],
    decode: Callable[[list[int]], str],
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[str]:
    """What follows `ids`, as text in pieces, until one of the tokens `ends` or `max_new_tokens`.

    Beyond the context's length the older half is forgotten and the rest read anew, so a text may be longer than it.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    shown, written = "", []
    for token in _tokens(reader, ids, max_new_tokens, sampling, generator):
        if token in ends:
            break
        written.append(token)
        text = decode(written)
        if not text.endswith(REPLACEMENT):  # else a character is still incomplete
            yield text[len(shown) :]
            shown = text
    rest = decode(written)[len(shown) :]
    if rest:
        yield rest


def _tokens(
    reader: Reader, ids: list[int], count: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    known, pending = list(ids), ids[-reader.context :]
    for _ in range(count):
        if reader.length + len(pending) > reader.context:
            reader.forget()
            pending = known[-(reader.context // 2) :]
        with torch.inference_mode():
            token = sample_token(reader.read(pending), sampling, generator)
        known.append(token)
        pending = [token]
        yield token


def sample_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw from logits (V,): temperature, then the top_k likeliest, then the smallest set of at least top_p."""
    logits = logits.float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        probabilities[order[beyond]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))

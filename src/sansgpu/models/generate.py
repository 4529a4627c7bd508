"""Text generation with a key-value cache, streamed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.text import TextCodec

NUCLEUS_TOKENS = 1024  # most likely tokens that nearly always hold the probability of top-p
REPLACEMENT = "\ufffd"  # an incomplete UTF-8 sequence decodes to this


@dataclass(frozen=True)
class Sampling:
    """Sampling options. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 disable their filters."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def require_valid_sampling(sampling: Sampling) -> None:
    """Raises ConfigError if an option is out of range."""
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ConfigError("--temperature and --top-k must not be negative, and --top-p must be in (0, 1].")


class IncrementalReader(Protocol):
    """A language model with a cache of the tokens it has read."""

    @property
    def context(self) -> int:
        """Maximum number of tokens in the cache."""

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""

    def reset(self) -> None:
        """Empties the cache."""

    def forward_new(self, ids: list[int]) -> torch.Tensor:
        """Appends `ids` to the cached tokens; returns the logits (V,) of the next token."""


class DecoderReader:
    """An IncrementalReader for a `TransformerLM`."""

    def __init__(self, model: TransformerLM) -> None:
        self._model, self.context = model, model.config.max_seq_len
        self.reset()

    @property
    def length(self) -> int:
        return self._caches[0].length

    def reset(self) -> None:
        self._caches = self._model.new_caches(1)

    def forward_new(self, ids: list[int]) -> torch.Tensor:
        inputs = torch.tensor([ids], device=self._model.embedding.weight.device)
        hidden = self._model.hidden(inputs, caches=self._caches)[0, -1]
        return hidden @ self._model.head_weight.T


def generate(
    model: TransformerLM, tokenizer: TextCodec, prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Yields text until the end-of-text token or `max_new_tokens`. The prompt starts a document, as in training."""
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(prompt)] or [tokenizer.end_id]
    with reading(model):
        yield from write(DecoderReader(model), ids, {tokenizer.end_id}, tokenizer.decode, max_new_tokens, sampling)


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode and restores its mode on exit."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def write(
    reader: IncrementalReader,
    ids: list[int],
    ends: Container[int],
    decode: Callable[[list[int]], str],
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[str]:
    """Yields pieces of text that continue `ids`, until one of the tokens `ends` or `max_new_tokens`.

    When the context is full, generation goes on from the newer half of it, so a text may be longer than the context.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    yielded, new_ids = "", []
    for token in _tokens(reader, ids, max_new_tokens, sampling, generator):
        if token in ends:
            break
        new_ids.append(token)
        text = decode(new_ids)
        if not text.endswith(REPLACEMENT):  # otherwise the last character is incomplete
            yield text[len(yielded) :]
            yielded = text
    rest = decode(new_ids)[len(yielded) :]
    if rest:
        yield rest


def _tokens(
    reader: IncrementalReader, ids: list[int], count: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    all_ids, pending = list(ids), ids[-reader.context :]
    for _ in range(count):
        if reader.length + len(pending) > reader.context:
            reader.reset()
            pending = all_ids[-(reader.context // 2) :]
        with torch.inference_mode():
            token = sample_token(reader.forward_new(pending), sampling, generator)
        all_ids.append(token)
        pending = [token]
        yield token


def sample_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Samples a token from logits (V,)."""
    return sample_tokens(logits[None], sampling, [generator])[0]


def sample_tokens(logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """Samples a token from each row of logits (B, V), applying temperature, then top-k, then top-p.

    A row draws one number from its own generator, and its token does not depend on other rows.
    """
    logits = logits.float().cpu()
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    logits, order = logits / sampling.temperature, None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, order = logits.topk(sampling.top_k)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        probabilities, order = _nucleus(probabilities, order, sampling.top_p)
    sums = probabilities.cumsum(dim=-1)
    draws = torch.cat([torch.rand(1, generator=generator) for generator in generators])[:, None]
    places = torch.searchsorted(sums, draws * sums[:, -1:], right=True)
    # Rounding can put a draw on the end of the sums: then the last token with a probability is the one.
    places = places.clamp(max=torch.searchsorted(sums, sums[:, -1:].contiguous()))
    chosen: list[int] = (places if order is None else order.gather(-1, places)).flatten().tolist()
    return chosen


def _nucleus(
    probabilities: torch.Tensor, order: torch.Tensor | None, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest probabilities that first add up to top_p, the others as 0, and their tokens.

    Sorts only the largest ones if they suffice, because sorting a vocabulary takes as long as a small model.
    """
    if order is None:
        ordered, order = probabilities.topk(min(NUCLEUS_TOKENS, probabilities.shape[-1]))
        if bool((ordered.sum(dim=-1) < top_p).any()):
            ordered, order = probabilities.sort(descending=True, stable=True)
    else:
        ordered = probabilities  # top-k has sorted them
    before = ordered.cumsum(dim=-1) - ordered
    return ordered.masked_fill(before >= top_p, 0), order

"""Samples tokens from logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from sansgpu.config import ConfigError, SansGPUError

MIN_TEMPERATURE = 1e-6  # lower ones could overflow the logits, and would be greedy just as well
NUCLEUS_TOKENS = 1024  # top-p looks at this many of the most likely tokens first, which nearly always suffice


@dataclass(frozen=True)
class Sampling:
    """Sampling options. A `temperature` of 0 is greedy; a `top_k` of 0 and a `top_p` of 1 disable these filters."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def require_valid_sampling(sampling: Sampling) -> None:
    """Raises ConfigError if an option is out of range."""
    if not 0 <= sampling.temperature < math.inf:
        raise ConfigError(f"--temperature is {sampling.temperature:g}; set it to 0 (greedy) or a positive number.")
    if sampling.top_k < 0:
        raise ConfigError(f"--top-k is {sampling.top_k}; set it to a number of tokens, or to 0 for all.")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"--top-p is {sampling.top_p:g}; set it to a number above 0 and at most 1.")


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Context that puts a model into evaluation mode, and restores its mode on exit."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def sample_tokens(logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """Samples a token from each row of logits (B, V), applying temperature, then top-k, then top-p.

    Each row draws one number from its own generator, so its token does not depend on the other rows. Raises
    SansGPUError if a logit is NaN or infinite.
    """
    logits = logits.float().cpu()
    if sampling.temperature == 0:
        greedy: list[int] = logits.numpy().argmax(axis=-1).tolist()  # more than twice as fast as torch
        _require_finite(logits[range(len(greedy)), greedy])
        return greedy
    logits, order = logits / max(sampling.temperature, MIN_TEMPERATURE), None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, order = logits.topk(sampling.top_k)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        probabilities, order = _nucleus(probabilities, order, sampling.top_p)
    sums = probabilities.cumsum(dim=-1)
    _require_finite(sums[:, -1])
    draws = torch.cat([torch.rand(1, generator=generator) for generator in generators])[:, None]
    places = torch.searchsorted(sums, draws * sums[:, -1:], right=True)
    # Rounding can put a draw at the end of the cumulative sum, beyond the last token with a nonzero probability.
    places = places.clamp(max=torch.searchsorted(sums, sums[:, -1:].contiguous()))
    chosen: list[int] = (places if order is None else order.gather(-1, places)).flatten().tolist()
    return chosen


def _require_finite(values: torch.Tensor) -> None:
    """Raises SansGPUError if one of the values, which are computed from logits, is NaN or infinite."""
    if not bool(values.isfinite().all()):
        raise SansGPUError(
            "the model's logits are NaN or infinite: its weights are damaged, or training has diverged; use another "
            "model or an earlier snapshot."
        )


def _nucleus(
    probabilities: torch.Tensor, order: torch.Tensor | None, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies top-p: returns the probabilities in descending order, with those beyond top_p as 0, and their tokens.

    `order` are the tokens of the probabilities if these are already sorted. Sorts only the largest probabilities if
    they suffice, because sorting a whole vocabulary takes as long as running a small model.
    """
    if order is None:
        ordered, order = probabilities.topk(min(NUCLEUS_TOKENS, probabilities.shape[-1]))
        if bool((ordered.sum(dim=-1) < top_p).any()):
            ordered, order = probabilities.sort(descending=True, stable=True)
    else:
        ordered = probabilities  # top-k has sorted them
    before = ordered.cumsum(dim=-1) - ordered
    return ordered.masked_fill(before >= top_p, 0), order

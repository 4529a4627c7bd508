"""Generates one sequence with any causal transformers model, and uses its cache if a trial gives the right logits.

Models name and build their caches differently: keys and values, recurrent states, or both in a class of their own. The
first forward pass creates the model's own cache, and each later pass gets what the pass before it returned. Models that
do not return their cache get transformers' DynamicCache.

T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sansgpu.models.generation.generate import PROMPT_TOKENS, SingleReader
from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.probes import autocast_of, close_outputs, output_of, probe_tokens

# Tokens of the passes of a trial: a prompt, a second piece of it, and two decoding steps. Together they are fewer than
# MIN_ROWS, so that the same matmul kernels compute them in one pass and in several.
TRIAL = (5, 3, 1, 1)
TRIAL_ERROR = 0.1  # maximum error of cached logits, relative to the error of logits without the earlier tokens


class CacheUse(NamedTuple):
    """How to use a model's cache."""

    given: bool  # the first pass gets an empty cache, for models that do not return their own
    positions: bool  # each pass gets position ids, which some models do not infer from their cache
    pieces: bool  # a long prompt may take several passes


class PretrainedReader(SingleReader):
    """A BatchReader with one sequence for any transformers model. Without `use`, each pass computes all tokens."""

    def __init__(self, model: PreTrainedModel, use: CacheUse | None) -> None:
        self._model, self._use = model, use
        self.reset()

    def reset(self) -> None:
        self._ids: list[int] = []
        self._cache: dict[str, Any] = {}  # keyword arguments of the model
        if self._use is not None and self._use.given:
            self._cache["past_key_values"] = DynamicCache(config=self._model.config)

    def forward_new(self, ids: list[int]) -> torch.Tensor:
        if self._use is None:
            self._ids += ids
            return _logits(self._model, self._ids)[-1]
        size = PROMPT_TOKENS if self._use.pieces else len(ids)
        for start in range(0, len(ids), size):
            logits = self._forward_piece(ids[start : start + size], self._use)
        return logits

    def _forward_piece(self, ids: list[int], use: CacheUse) -> torch.Tensor:
        inputs = {"input_ids": torch.tensor([ids], device=self._model.device)}
        if use.positions:
            end = len(self._ids) + len(ids)
            inputs["position_ids"] = torch.arange(len(self._ids), end, device=self._model.device)[None]
        with autocast_of(self._model):
            output = output_of(self._model, lambda states: states[0, -1:], **inputs, **self._cache, use_cache=True)
        self._ids += ids
        if not use.given:  # a given cache has grown in place
            self._cache = _cache_in(output, self._model)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    @property
    def holds_only_keys(self) -> bool:
        """True if the cache consists of keys and values, without recurrent states.

        Some models do not continue from a recurrent state if a later pass has several tokens. In a trial with few
        tokens, this error can be smaller than the rounding in bf16.
        """
        (cache, *others) = self._cache.values()
        if others or type(cache) is not DynamicCache:
            return False
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def _cache_in(output: Any, model: PreTrainedModel) -> dict[str, Any]:
    """Returns the outputs that the next pass takes, which are the cache. Raises ValueError if there are none."""
    taken = arguments_of(model)
    if not (cache := {name: value for name, value in output.items() if name in taken and value is not None}):
        raise ValueError(f"{type(model).__name__} returns no cache")
    return cache


def arguments_of(model: PreTrainedModel) -> set[str]:
    """Returns the names of the arguments that a model takes."""
    return set(inspect.signature(model.forward).parameters)


def _logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Computes the logits (T, V) of a sequence without a cache."""
    with autocast_of(model):
        logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits


def cache_use(model: PreTrainedModel) -> CacheUse | None:
    """Returns the first use of the cache with which a trial gives the logits of a pass over all tokens, or None."""
    tokens = probe_tokens(model, sum(TRIAL)).tolist()
    can_take = (True, False) if "position_ids" in arguments_of(model) else (False,)
    with torch.inference_mode(), reading(model):
        expected, alone = _logits(model, tokens).float(), _logits(model, tokens[-1:])[-1].float()
        most = TRIAL_ERROR * float((alone - expected[-1]).abs().max())
        for use in map(CacheUse._make, product((False, True), can_take, (True, False))):
            try:
                found, places = _trial(model, use, tokens)
            except Exception:  # whatever goes wrong, passes over all tokens still work
                continue
            error = float((found - expected[places]).abs().max())
            if error <= most and close_outputs(model, found, expected[places]):
                return use
    return None


def _trial(model: PreTrainedModel, use: CacheUse, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Reads tokens in several passes; returns the logits after each of them, and the indices of their last tokens.

    Raises ValueError if the cache cannot be used in this way.
    """
    reader = PretrainedReader(model, use)
    sizes = TRIAL if use.pieces else (TRIAL[0] + TRIAL[1], *TRIAL[2:])
    ends = list(accumulate(sizes))
    logits = [reader.forward_new(tokens[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    if use.pieces and not reader.holds_only_keys:
        raise ValueError(f"{type(model).__name__} has recurrent states")
    return torch.stack(logits).float(), [end - 1 for end in ends]

"""Continues one sequence with any causal transformers model, with as much of its cache as a trial shows to be right.

Models name and build their caches differently: keys and values, recurrent states, or both in a class of their own. The
first forward pass creates the model's own cache, and each later pass gets back what the pass before it returned.

T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedModel

from sansgpu.models.generation.generate import PROMPT_TOKENS, SingleReader
from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.packed_forward import output_of
from sansgpu.models.huggingface.probes import autocast_of, close_outputs, probe_tokens

# Tokens of the passes of a trial: a prompt, a second piece of it, and two decoding steps. Together they are fewer than
# MIN_ROWS, so that the same matmul kernels compute them in one pass and in several.
TRIAL = (5, 3, 1, 1)
TRIAL_ERROR = 0.1  # maximum error of cached logits, relative to the error of logits without the earlier tokens


class CacheUse(Enum):
    """How a model's cache can be used."""

    PIECES = "later passes may have several tokens"
    TOKENS = "later passes may have one token"
    NONE = "each pass computes the whole sequence"


class PretrainedReader(SingleReader):
    """A BatchReader with one sequence for any transformers model; see `cache_use`."""

    def __init__(self, model: PreTrainedModel, use: CacheUse) -> None:
        self._model, self._use = model, use
        self.reset()

    def reset(self) -> None:
        self._ids: list[int] = []  # the whole sequence if the cache is not used
        self._cache: dict[str, Any] = {}  # keyword arguments of the model

    def forward_new(self, ids: list[int]) -> torch.Tensor:
        if self._use is CacheUse.NONE:
            self._ids += ids
            return _logits(self._model, self._ids)[-1]
        size = PROMPT_TOKENS if self._use is CacheUse.PIECES else len(ids)
        for start in range(0, len(ids), size):
            inputs = torch.tensor([ids[start : start + size]], device=self._model.device)
            with autocast_of(self._model):
                output = output_of(self._model, _last, input_ids=inputs, use_cache=True, **self._cache)
            self._cache = _cache_in(output, self._model)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def _last(states: torch.Tensor) -> torch.Tensor:
    return states[0, -1:]


def _cache_in(output: Any, model: PreTrainedModel) -> dict[str, Any]:
    """Returns the outputs that the model's forward pass also takes, which are its cache.

    Raises ValueError if there are none.
    """
    taken = inspect.signature(model.forward).parameters
    if not (cache := {name: value for name, value in output.items() if name in taken and value is not None}):
        raise ValueError(f"{type(model).__name__} returns no cache")
    return cache


def _logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Computes the logits (T, V) of a sequence without a cache."""
    with autocast_of(model):
        logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits


def cache_use(model: PreTrainedModel) -> CacheUse:
    """Returns the best use of the cache that gives the same logits as passes over the whole sequence."""
    tokens = probe_tokens(model, sum(TRIAL)).tolist()
    with torch.inference_mode(), reading(model):
        expected, alone = _logits(model, tokens).float(), _logits(model, tokens[-1:])[-1].float()
        most = TRIAL_ERROR * float((alone - expected[-1]).abs().max())
        for use, sizes in ((CacheUse.PIECES, TRIAL), (CacheUse.TOKENS, (sum(TRIAL[:2]), *TRIAL[2:]))):
            try:
                found, places = _cached_logits(PretrainedReader(model, use), tokens, sizes)
            except Exception:  # whatever goes wrong, passes over the whole sequence still work
                continue
            error = float((found - expected[places]).abs().max())
            if error <= most and close_outputs(model, found, expected[places]):
                return use
    return CacheUse.NONE


def _cached_logits(
    reader: PretrainedReader, tokens: list[int], sizes: tuple[int, ...]
) -> tuple[torch.Tensor, list[int]]:
    """Reads tokens in passes of the given sizes; returns the logits after each pass, and the indices of these."""
    logits, end = [], 0
    ends = []
    for size in sizes:
        logits.append(reader.forward_new(tokens[end : end + size]))
        end += size
        ends.append(end - 1)
    return torch.stack(logits).float(), ends

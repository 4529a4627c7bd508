"""`sansgpu generate`: a stream of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sansgpu.config import ConfigError
from sansgpu.jobs.loading import load_model
from sansgpu.models.generate import Sampling, generate


def generate_text(
    target: str, prompt: str, max_new_tokens: int, sampling: Sampling, snapshot: str, warn: Callable[[str], None]
) -> Iterator[str]:
    """What the model of a run or a Hugging Face folder writes after `prompt`, as it is written."""
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ConfigError("--temperature and --top-k must not be negative, and --top-p must be in (0, 1].")
    loaded = load_model(target, snapshot, warn)
    return generate(loaded.decoder, loaded.tokenizer, prompt, max_new_tokens, sampling)

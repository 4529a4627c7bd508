"""Sampling with a key-value cache, as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

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


def generate(
    model: TransformerLM, tokenizer: TextCodec, prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Text as it is written, until the end of the text or `max_new_tokens`.

    The prompt begins a document, as in training. Beyond the context's length the older half is forgotten and the
    rest read anew, so a text may be longer than the context.
    """
    ids = [tokenizer.end_id, *tokenizer.encode(prompt)]
    generator = torch.Generator().manual_seed(sampling.seed)
    shown, written = "", []
    for token in _tokens(model, ids, max_new_tokens, sampling, generator):
        if token == tokenizer.end_id:
            break
        written.append(token)
        text = tokenizer.decode(written)
        if not text.endswith(REPLACEMENT):  # else a character is still incomplete
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(written)[len(shown) :]
    if rest:
        yield rest


def _tokens(
    model: TransformerLM, ids: list[int], count: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    context, device = model.config.max_seq_len, model.embedding.weight.device
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            caches, pending = model.new_caches(1), ids[-context:]
            for _ in range(count):
                if caches[0].length + len(pending) > context:
                    caches, pending = model.new_caches(1), ids[-(context // 2) :]
                inputs = torch.tensor([pending], device=device)
                hidden = model.hidden(inputs, caches=caches)[0, -1]
                token = sample_token(hidden @ model.head_weight.T, sampling, generator)
                ids.append(token)
                pending = [token]
                yield token
    finally:
        model.train(was_training)


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

"""`sansgpu generate`: a stream of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sansgpu.jobs.loading import is_ours, load_model
from sansgpu.models.generate import Sampling, generate, require_possible


def generate_text(
    target: str, prompt: str, max_new_tokens: int, sampling: Sampling, snapshot: str, warn: Callable[[str], None]
) -> Iterator[str]:
    """What the model of a run or a Hugging Face folder writes after `prompt`, as it is written."""
    require_possible(sampling)
    if not is_ours(target):
        return _continued(target, prompt, max_new_tokens, sampling, snapshot, warn)
    loaded = load_model(target, snapshot, warn)
    return generate(loaded.decoder, loaded.tokenizer, prompt, max_new_tokens, sampling)


def _continued(
    target: str, prompt: str, max_new_tokens: int, sampling: Sampling, snapshot: str, warn: Callable[[str], None]
) -> Iterator[str]:
    """The same of a model of transformers."""
    from sansgpu.jobs.fine_tuned import load_fine_tuned, narrow_where_faster  # imports transformers
    from sansgpu.models.chat import continued

    loaded = load_fine_tuned(target, "causal", snapshot, warn)
    narrow_where_faster(loaded.objective.model)
    return continued(loaded.objective.model, loaded.tokenizer, prompt, max_new_tokens, sampling)

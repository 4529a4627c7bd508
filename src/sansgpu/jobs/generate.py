"""Text generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sansgpu.jobs.loading import is_ours, load_model
from sansgpu.models.generate import Sampling, generate, require_valid_sampling


def generate_text(
    target: str,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    snapshot: str,
    warn: Callable[[str], None],
    remote_code: bool = False,
) -> Iterator[str]:
    """Streams the continuation of `prompt` by a run, a Hugging Face model or a GGUF file.

    `remote_code` allows the model's own Python code to run.
    """
    require_valid_sampling(sampling)
    if is_ours(target):
        ours = load_model(target, snapshot, warn)
        return generate(ours.decoder, ours.tokenizer, prompt, max_new_tokens, sampling)
    from sansgpu.jobs.fine_tuned import load_fine_tuned, narrow_where_faster  # imports transformers
    from sansgpu.models.chat import continued

    loaded = load_fine_tuned(target, "causal", snapshot, warn, remote_code)
    narrow_where_faster(loaded.objective.model)
    return continued(loaded.objective.model, loaded.tokenizer, prompt, max_new_tokens, sampling)

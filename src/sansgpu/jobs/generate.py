"""Text generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sansgpu.data.shards import ReportProgress, ignore_progress
from sansgpu.models.generation.generate import stream
from sansgpu.models.generation.sampling import Sampling, require_valid_sampling
from sansgpu.train.loading import open_model


def generate_text(
    target: str,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    snapshot: str,
    warn: Callable[[str], None],
    remote_code: bool = False,
    objective: str | None = None,
    progress: ReportProgress = ignore_progress,
) -> Iterator[str]:
    """Streams the continuation of `prompt` by a run, a Hugging Face model or a GGUF file.

    `remote_code` allows the model's own Python code to run.
    """
    require_valid_sampling(sampling)
    loaded = open_model(target, "generate", snapshot, warn, remote_code, objective, progress)
    model = loaded.kind.batch_model(loaded)
    return stream(model, model.text_ids(prompt), max_new_tokens, sampling)

"""Log-probabilities of answers before training, computed once and cached by the content of the answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.data.shards import ReportProgress, cache_key, cached
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.models.huggingface.pretrained import weights_fingerprint
from sansgpu.models.modules import narrowed_matrices
from sansgpu.tasks.fine_tuning import passes
from sansgpu.tasks.preference.batch import AnswerPairs, PreferenceExamples
from sansgpu.tasks.preference.objective import PreferenceObjective

CHUNK = 64  # examples whose results are one file of the cache, so that a killed run loses little work


_FILE = "log_probabilities.npy"


_ADAPTER_KEYS = {"name_or_path", "adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "merge_adapter"}


def compute_reference(
    parts: list[PreferenceExamples],
    model: Callable[[], PreferenceObjective],
    settings: ModelConfig,
    device: torch.device,
    precision: str,
    cache: Path,
    progress: ReportProgress,
    group: Group = SINGLE_PROCESS,
) -> None:
    """Sets the reference of `parts`, whose chunks the ranks divide. `model` returns the model before training.

    It is called only if a chunk is not in the cache. Raises ConfigError if the cache cannot be used.
    """
    splits = [(part, np.split(np.arange(len(part)), range(CHUNK, len(part), CHUNK))) for part in parts]
    chunks = [(part, numbers) for part, pieces in splits for numbers in pieces]
    weights = (weights_fingerprint(settings), settings.model_dump_json(exclude=_ADAPTER_KEYS), precision)
    own = {}
    for number in range(group.rank, len(chunks), group.size):
        progress("computing the reference", number, len(chunks), "batch")
        part, indices = chunks[number]
        batch = part.batch(indices)

        def build(folder: Path, batch: AnswerPairs = batch) -> None:
            np.save(folder / _FILE, _log_probabilities(model(), batch, device, precision))

        folder = cached(cache / "reference" / cache_key("reference", *weights, batch.content()), build)
        own[number] = _read(folder, len(indices)).tolist()
    for found in group.all_gather_object(own):
        for number, values in found.items():
            part, indices = chunks[int(number)]
            part.reference[indices] = values


def _read(folder: Path, count: int) -> np.ndarray:
    try:
        values: np.ndarray = np.load(folder / _FILE, allow_pickle=False)
        if values.shape == (count, 2) and values.dtype == np.float64 and np.isfinite(values).all():
            return values
    except (OSError, ValueError, EOFError):
        pass
    raise ConfigError(
        f"the cached log-probabilities in {folder} are damaged; delete that folder to compute them again."
    )


def _log_probabilities(
    objective: PreferenceObjective, batch: AnswerPairs, device: torch.device, precision: str
) -> np.ndarray:
    """Returns the log-probabilities of the answers, (B, 2) float64, in passes of a few thousand tokens."""
    from sansgpu.models.generation.sampling import reading

    objective.model.to(device)  # type: ignore[arg-type]
    results = np.empty((len(batch), 2))
    narrow = precision == "bf16"  # the first step must find no difference from its own rounded weights
    rounded = narrowed_matrices(objective.model) if narrow else nullcontext()
    with reading(objective.model), torch.no_grad(), rounded, torch.autocast(device.type, torch.bfloat16, narrow):
        for numbers in passes(batch.sizes.sum(1).numpy()):
            pieces = AnswerPairs.joined([batch.rows(number, number + 1) for number in numbers])
            results[numbers] = objective.log_probabilities(pieces.to(device)).cpu().numpy()
    return results

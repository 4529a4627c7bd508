"""Knowledge distillation, shared by tasks: the teacher's corpus and folder, and the student's loss and metrics.

`sansgpu distill` writes the tokenized corpus as arrays, which training reads, so that both use the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.teacher_folder import OF_TARGET, REMEDY, TeacherFolder, open_teacher_folder
from sansgpu.kernels.block_quantization import Matrix
from sansgpu.kernels.mixed_loss import SoftTargets
from sansgpu.tasks.settings import DistilledTrainingConfig
from sansgpu.tasks.task import StepSums, Sums

# Keys of the sums of a step. The KL divergence is that of the tokens whose loss is trained on, which may be selected.
CROSS_ENTROPY, TARGETS, KL, KL_TARGETS = "cross_entropy", "targets", "kl", "kl_targets"


@dataclass(frozen=True)
class Lesson:
    """The corpus for a teacher to predict.

    `arrays` are the tokens of the corpus, for training to read. `counts` (E,) are the numbers of predicted tokens in
    each training example. `sequences` returns a range of examples, whose targets are the tokens to predict.
    """

    arrays: dict[str, np.ndarray]
    counts: np.ndarray
    sequences: Callable[[int, int], PackedSequences]
    fingerprint: str
    notes: Sequence[str] = ()  # messages for the user


def sequences_of(batch: Batch) -> PackedSequences:
    """Returns the documents in the rows of a batch as sequences that do not attend to each other."""
    documents = torch.zeros_like(batch.inputs) if batch.document_ids is None else batch.document_ids
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([documents.numel()]))
    return PackedSequences(batch.inputs.flatten(), lengths, batch.targets.flatten())


def vocabulary_fingerprint(backend: Any) -> str:
    """Returns a fingerprint of the tokens and ids of a tokenizer from the `tokenizers` library."""
    vocabulary = sorted(backend.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def require_same_vocabulary(backend: Any, name: str, folder: TeacherFolder) -> None:
    """Raises ConfigError if a model's vocabulary differs from the teacher's."""
    if vocabulary_fingerprint(backend) != folder.settings["vocabulary"]:
        raise ConfigError(
            f"{name} has a different tokenizer from the teacher {folder.settings['teacher']} of {folder.root}; choose "
            "a model with the teacher's tokenizer."
        )


def configured_teacher_folder(config: Config) -> TeacherFolder:
    """Opens the folder training.distillation.teacher.

    Raises ConfigError if it is for a different task or example length, or lacks what training needs.
    """
    settings = DistilledTrainingConfig.of(config).distillation
    folder = open_teacher_folder(local_path(str(settings.teacher)))
    task, length = folder.settings["task"], folder.settings["max_length"]
    if settings.weight and not folder.settings["top_k"]:
        raise ConfigError(
            f"{folder.root} was written with --top-k 0, without the teacher's most likely tokens; set "
            "training.distillation.weight to 0 and token_share below 1, or run `sansgpu distill --top-k 32` with a "
            "different --output."
        )
    if settings.selects_tokens and OF_TARGET not in folder.fields:
        raise ConfigError(
            f"{folder.root} was written by an earlier version of `sansgpu distill`, without the probabilities that "
            f"training.distillation.token_share needs; delete it and {REMEDY}."
        )
    if task != config.task:
        raise ConfigError(
            f"{folder.root} was written for task {task}; set task to {task}, or run `sansgpu distill --task "
            f"{config.task}`."
        )
    if "max_length" in config.data.model_fields_set and config.data.max_length != length:
        raise ConfigError(
            f"data.max_length is {config.data.max_length}, but {folder.root} has examples of at most "
            f"{counted(length, 'token')}; remove data.max_length, or run `sansgpu distill --max-length` again."
        )
    return folder


def with_length_of(config: Config, folder: TeacherFolder) -> Config:
    """Sets data.max_length to the length of the folder's examples."""
    return config.with_values("data", max_length=folder.settings["max_length"])


def has_largest_excess(losses: torch.Tensor, reference: torch.Tensor, share: float) -> torch.Tensor:
    """Returns for which tokens (N,) `losses` exceed those of a `reference` model most: a `share` of them, rounded."""
    count = max(1, round(share * len(losses)))
    order = torch.argsort(losses - reference, descending=True, stable=True)
    return torch.zeros(len(losses), dtype=torch.bool, device=losses.device).index_fill(0, order[:count], True)


class StudentLoss:
    """Selects tokens, converts a teacher's predictions to soft targets, and sums the loss for a step's metrics."""

    def __init__(self, config: Config) -> None:
        self._settings, self.sums = DistilledTrainingConfig.of(config).distillation, StepSums()

    def soft_targets(self, batch: Batch | PackedSequences) -> SoftTargets | None:
        """Returns soft targets with a row for each token of the batch, or None if they are not used."""
        ids, log_probabilities = batch.teacher_ids, batch.teacher_log_probabilities
        if ids is None or log_probabilities is None or not self._settings.weight:
            return None
        rows = ids.flatten(0, -2).long(), log_probabilities.flatten(0, -2).float()
        return SoftTargets(*rows, self._settings.weight, self._settings.temperature)

    def add(self, parts: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds the cross-entropy and the KL divergence of a micro-batch, (2,)."""
        (cross_entropy, kl), count = parts.tolist(), float((targets != IGNORE).sum())
        self.sums.add({KL: kl, KL_TARGETS: count})
        if not self._settings.selects_tokens:  # otherwise `select` has added that of all tokens
            self.sums.add({CROSS_ENTROPY: cross_entropy, TARGETS: count})

    def select(self, hidden: torch.Tensor, head: Matrix, batch: Batch) -> tuple[torch.Tensor, float]:
        """Selects the tokens of a micro-batch with the largest excess loss (Rho-1, arXiv 2404.07965).

        The excess loss is the student's cross-entropy, from hidden states (N, D) and `head` (V, D), minus the
        teacher's. Returns the targets (N,), IGNORE for tokens that are not selected, and the factor by which their
        summed loss must be multiplied to count as many targets as the micro-batch has.
        """
        targets, known = batch.targets.flatten(), batch.teacher_target_log_probabilities
        if not self._settings.selects_tokens or known is None:
            return targets, 1.0
        places = (targets != IGNORE).nonzero()[:, 0]
        if not len(places):
            return targets, 1.0
        from sansgpu.kernels.log_probabilities import target_log_probabilities

        with torch.no_grad():
            losses = -target_log_probabilities(hidden[places], head, targets[places])
        self.sums.add({CROSS_ENTROPY: float(losses.sum()), TARGETS: float(len(places))})
        chosen = places[has_largest_excess(losses, -known.flatten()[places].float(), self._settings.token_share)]
        selected = torch.full_like(targets, IGNORE).index_put((chosen,), targets[chosen])
        return selected, len(places) / len(chosen)


def student_metrics(sums: Sums) -> dict[str, float]:
    """Returns the plain cross-entropy, which is comparable to the loss without a teacher, and the KL divergence."""
    parts = {"loss": (CROSS_ENTROPY, TARGETS), "kl": (KL, KL_TARGETS)}
    return {name: sums[part] / sums[count] for name, (part, count) in parts.items() if sums.get(count)}

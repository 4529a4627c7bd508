"""Pretrains a decoder from scratch by next-token prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sansgpu.config import derive_seed
from sansgpu.config.schema import Config
from sansgpu.data.batch import Batch
from sansgpu.kernels.cross_entropy import LossOptions, linear_cross_entropy
from sansgpu.kernels.mixed_loss import linear_mixed_loss
from sansgpu.models import TransformerLM
from sansgpu.models.architectures import DecoderConfig
from sansgpu.models.modules import integer_of_model
from sansgpu.tasks.base import ObjectiveBase
from sansgpu.tasks.distillation import StudentLoss, student_metrics
from sansgpu.tasks.task import Sums


class PretrainObjective(ObjectiveBase):
    """A decoder and its loss."""

    def __init__(self, config: Config, model: Any = None) -> None:
        """Uses `model` or, by default, a new decoder."""
        self._loss_options = LossOptions(config.training.label_smoothing, config.training.z_loss)
        self._student = StudentLoss(config)
        self.model = model or TransformerLM(DecoderConfig.of(config), derive_seed(config.training.seed, "model"))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Computes the summed loss, (): cross-entropy with label smoothing and z-loss, or the distillation loss.

        If tokens are selected, it is their mean loss times the number of targets of `batch`.
        """
        hidden = self.model.hidden(batch.inputs, batch.positions, batch.document_ids).flatten(0, 1)
        head, options = self.model.head_matrix, replace(self._loss_options, integer=integer_of_model(self.model))
        targets, factor = self._student.select(hidden, head, batch)
        if (soft := self._student.soft_targets(batch)) is None:
            return factor * linear_cross_entropy(hidden, head, targets, options)
        loss, parts = linear_mixed_loss(hidden, head, targets, soft, options)
        self._student.add(parts, targets)
        return factor * loss

    def step_sums(self) -> Sums:
        return self._student.sums.take()

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return student_metrics(sums)

    def between_blocks(self, callback: Callable[[], None]) -> None:
        self.model.before_block = callback

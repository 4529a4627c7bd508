"""The objective of supervised fine-tuning (SFT): next-token prediction in the assistant turns of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sansgpu.config.schema import Config
from sansgpu.data.sequences import PackedSequences
from sansgpu.kernels.attention import token_places
from sansgpu.kernels.cross_entropy import DEFAULT_LOSS_OPTIONS, LossOptions
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.formats.decoder_folder import load_gguf_decoder
from sansgpu.models.formats.gguf_source import is_gguf, open_gguf
from sansgpu.models.generation.answer_end import token_ids
from sansgpu.models.huggingface.causal_lm import student_loss
from sansgpu.tasks.base import TRAINING, ModelUse, ObjectiveBase
from sansgpu.tasks.distillation import StudentLoss, student_metrics
from sansgpu.tasks.evaluation import TokensOf
from sansgpu.tasks.fine_tuning import FineTuning
from sansgpu.tasks.task import ModelSource, Sums


class SFTObjective(FineTuning):
    """A causal model and its loss."""

    head_type = "causal"

    def __init__(self, config: Config, use: ModelUse = TRAINING) -> None:
        super().__init__(config, use)
        self._student = StudentLoss(config)

    def step_sums(self) -> Sums:
        return {**super().step_sums(), **self._student.sums.take()}

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return {**super().step_metrics(sums), **student_metrics(sums)}

    def summed_loss(self, batch: Any) -> torch.Tensor:
        """Computes the summed loss, (): cross-entropy with label smoothing and z-loss, or the distillation loss."""
        training = self.config.training
        if (soft := self._student.soft_targets(batch)) is not None:
            loss, parts = student_loss(self.unpadded, batch.tokens, batch.lengths, batch.targets, soft, training.z_loss)
            self._student.add(parts, batch.targets)
            return loss
        return self._cross_entropy(batch, LossOptions(training.label_smoothing, training.z_loss))

    def plain_loss(self, batch: PackedSequences) -> torch.Tensor:
        """Computes the summed cross-entropy without label smoothing and z-loss, ()."""
        return self._cross_entropy(batch, DEFAULT_LOSS_OPTIONS)

    def _cross_entropy(self, batch: PackedSequences, options: LossOptions) -> torch.Tensor:
        return self.unpadded.summed_loss(batch.tokens, batch.lengths, batch.targets, options)


class DecoderChat(ObjectiveBase):
    """A TransformerLM with the interface of SFTObjective that evaluation and generation use."""

    def __init__(self, config: Config, model: TransformerLM, ends: Sequence[int]) -> None:
        self.config, self.model, self.ends = config, model, ends

    @classmethod
    def load(cls, source: ModelSource, config: Config) -> DecoderChat | None:
        """Loads a GGUF file. Returns None if `source` is not one, or if TransformerLM does not support the model."""
        if source.config is not None or not is_gguf(source.target):
            return None
        file = open_gguf(source.path)
        model = load_gguf_decoder(file)
        return None if model is None else cls(config, model, token_ids(file.settings["eos_token_id"]))

    def plain_loss(self, batch: PackedSequences) -> torch.Tensor:
        """Computes the summed cross-entropy, ()."""
        documents, positions = token_places(batch.lengths)
        return self.model.summed_loss(batch.tokens[None], batch.targets[None], positions[None], documents[None])

    def ordered(self, indices: np.ndarray, lengths: np.ndarray, sequence: TokensOf | None = None) -> np.ndarray:
        return indices

"""The objective of classifying texts or pairs of texts, or of predicting a score for each."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.nn.functional as F

from sansgpu.config.schema import Config
from sansgpu.data.sequences import PackedSequences
from sansgpu.models.huggingface.pretrained import Head, HeadType, ProblemType
from sansgpu.tasks.classify.labels import LabelKind
from sansgpu.tasks.classify.settings import LabelDataConfig
from sansgpu.tasks.fine_tuning import FineTuning

SCORE = "score"  # label name of the only output in regression
_PROBLEM_TYPES: dict[LabelKind, ProblemType] = {
    "single": "single_label_classification",
    "multiple": "multi_label_classification",
    "regression": "regression",
}
LABEL_KINDS = {problem: kind for kind, problem in _PROBLEM_TYPES.items()}


class ClassifyObjective(FineTuning):
    """A sequence classification model and its loss."""

    head_type: ClassVar[HeadType] = "sequence"
    class_weights: torch.Tensor | None = None  # (L,), of examples or of positive labels; set in training only

    @classmethod
    def head_of(cls, config: Config) -> Head:
        """Returns the head. It has two labels if the data has not been read, as in estimates."""
        kind = LabelDataConfig.of(config).label_kind
        if kind == "regression":
            return Head(cls.head_type, (SCORE,), "regression")
        problem = _PROBLEM_TYPES["single" if kind == "auto" else kind]
        return Head(cls.head_type, tuple(config.data.labels or ("0", "1")), problem)

    @property
    def label_kind(self) -> LabelKind:
        return LABEL_KINDS[cast(ProblemType, self.head.problem_type)]

    def summed_loss(self, batch: PackedSequences) -> torch.Tensor:
        smoothing = self.config.training.label_smoothing
        return self.losses(self.logits(batch), batch, smoothing, self.class_weights).sum()

    def logits(self, batch: PackedSequences) -> torch.Tensor:
        """Returns the logits, (B, L) fp32."""
        return self.unpadded.sequence_logits(batch.tokens, batch.lengths, batch.types)

    def losses(
        self, logits: torch.Tensor, batch: PackedSequences, smoothing: float = 0.0, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the loss of each example, (B,).

        It is cross-entropy, the mean of binary cross-entropies for several labels, or the squared error for scores.
        """
        known = batch.has_target()
        targets = batch.targets.masked_fill(~known[:, None], 0)
        on_device = None if weights is None else weights.to(logits.device)
        if self.label_kind == "single":
            losses = F.cross_entropy(logits, targets[:, 0], on_device, reduction="none", label_smoothing=smoothing)
        elif self.label_kind == "multiple":
            entropies = F.binary_cross_entropy_with_logits(
                logits, targets.to(logits.dtype), reduction="none", pos_weight=on_device
            )
            losses = entropies.mean(dim=1)
        else:
            losses = (logits[:, 0] - targets[:, 0]).square()
        return losses * known

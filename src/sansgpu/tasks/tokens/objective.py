"""The objective of token classification: tags for entities such as persons and places, or for parts of speech."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE
from sansgpu.data.sequences import PackedSequences
from sansgpu.models.huggingface.pretrained import Head
from sansgpu.tasks.fine_tuning import FineTuning


class TokensObjective(FineTuning):
    """A token classification model and its loss."""

    head_type = "tokens"

    @classmethod
    def head_of(cls, config: Config) -> Head:
        return Head(cls.head_type, tuple(config.data.labels or ()))

    @property
    def labels(self) -> list[str]:
        """The tags in the order of the logits."""
        names: Any = self.model.config.id2label
        return [names[number] for number in range(len(names))]

    def logits(self, batch: PackedSequences) -> torch.Tensor:
        """Returns the logits of each token, (N, labels)."""
        return self.unpadded.token_logits(batch.tokens, batch.lengths, batch.types)

    def summed_loss(self, batch: PackedSequences) -> torch.Tensor:
        """Computes the cross-entropy, summed over words: ()."""
        return F.cross_entropy(self.logits(batch), batch.targets, reduction="sum", ignore_index=IGNORE)

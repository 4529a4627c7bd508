"""The objective of extractive question answering: predict start and end of the answer in the context."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from sansgpu.data.sequences import PackedSequences
from sansgpu.tasks.fine_tuning import FineTuning


class QAObjective(FineTuning):
    """A model with a question-answering head, and its loss."""

    head_type = "qa"

    def summed_loss(self, batch: PackedSequences) -> torch.Tensor:
        """Computes the mean of start and end cross-entropy, summed over windows: ()."""
        losses = [(position_loss(s, t[0]) + position_loss(e, t[1])) / 2 for s, e, t in self.scores(batch)]
        return torch.stack(losses).sum()

    def scores(self, batch: PackedSequences) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields start logits (T,), end logits (T,) and target positions (2,) for each window."""
        starts, ends = self.unpadded.qa_logits(batch.tokens, batch.lengths, batch.types)
        lengths = batch.lengths.tolist()
        return zip(starts.split(lengths), ends.split(lengths), batch.targets, strict=True)


def position_loss(logits: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[None], position[None], reduction="sum")

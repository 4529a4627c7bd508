"""Evaluates causal models: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

from sansgpu.data.batch import Batch
from sansgpu.data.pack import Windows
from sansgpu.tasks.task import Sums


class CausalModel(Protocol):
    """`models.TransformerLM`, or a transformers model wrapped by `models.huggingface.HuggingFaceLM`."""

    def summed_loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes the cross-entropy summed over the targets, ()."""


class LanguageModeling:
    """A causal model and its validation windows."""

    def __init__(self, model: nn.Module, windows: Windows) -> None:
        self.model = model
        self._windows = windows

    def loss(self, batch: Batch) -> torch.Tensor:
        """Computes the cross-entropy summed over the targets, ()."""
        model = cast(CausalModel, self.model)
        return model.summed_loss(batch.inputs, batch.targets, batch.positions, batch.document_ids)

    @property
    def validation_examples(self) -> int:
        return len(self._windows)

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """Yields the windows in order, `size` at a time; pads the last batch, as a compiled graph has one shape."""
        windows = self._windows
        for start in range(0, len(windows), size):
            numbers = np.arange(start, min(start + size, len(windows)))
            sizes = torch.from_numpy(windows.target_bytes(numbers))[:, None]
            yield replace(windows.batch(numbers), target_bytes=sizes).rows(0, size)

    def evaluate(self, batch: Batch) -> Sums:
        """Returns the loss, the number of targets and the bytes of text that they cover."""
        assert batch.target_bytes is not None
        size = float(batch.target_bytes.sum())
        return {"loss": float(self.loss(batch)), "tokens": float(batch.target_count()), "bytes": size}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return text_metrics(sums)


def text_metrics(sums: Sums) -> dict[str, float]:
    """Computes loss in nats per token, perplexity, and bits per byte, which is comparable across vocabularies."""
    loss = sums["loss"] / sums["tokens"]
    bits = sums["loss"] / math.log(2) / max(1.0, sums["bytes"])
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}

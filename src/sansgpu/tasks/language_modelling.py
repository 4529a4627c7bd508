"""How well a model predicts a text: loss, perplexity and bits per byte of any causal model on any windows."""

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
    """`models.TransformerLM` or any model of transformers behind `models.huggingface.HuggingFaceLM`."""

    def summed_loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Cross-entropy summed over the targets, ()."""


class LanguageModelling:
    """A causal model and the windows it is measured on."""

    def __init__(self, model: nn.Module, windows: Windows) -> None:
        self.model = model
        self._windows = windows

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy summed over the targets."""
        model = cast(CausalModel, self.model)
        return model.summed_loss(batch.inputs, batch.targets, batch.positions, batch.document_ids)

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """The windows in order, `size` at a time, the last ones filled up: a compiled graph knows one shape."""
        windows = self._windows
        for start in range(0, len(windows), size):
            numbers = np.arange(start, min(start + size, len(windows)))
            sizes = torch.from_numpy(windows.target_bytes(numbers))[:, None]
            yield replace(windows.batch(numbers), target_bytes=sizes).rows(0, size)

    def evaluate(self, batch: Batch) -> Sums:
        """Loss, targets and the bytes of text that they cover."""
        assert batch.target_bytes is not None
        size = float(batch.target_bytes.sum())
        return {"loss": float(self.loss(batch)), "tokens": float(batch.target_count()), "bytes": size}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Loss, perplexity and bits per byte."""
        return text_metrics(sums)


def text_metrics(sums: Sums) -> dict[str, float]:
    """Loss in nats a token, perplexity, and bits per byte, which compares across vocabularies."""
    loss = sums["loss"] / sums["tokens"]
    bits = sums["loss"] / math.log(2) / max(1.0, sums["bytes"])
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}

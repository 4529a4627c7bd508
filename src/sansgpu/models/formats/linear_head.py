"""The file of a linear classifier of vectors, next to the Sentence Transformers model that computes the vectors.

D features of a vector, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.models.formats.weights import load_weights
from sansgpu.models.huggingface.source import model_file

LINEAR_HEAD = "head.safetensors"


@dataclass(frozen=True)
class LinearHead:
    """The weights of a classifier; its logits are `vector @ weight.T + bias`."""

    weight: torch.Tensor  # (L, D) float32
    bias: torch.Tensor  # (L,) float32

    def save(self, folder: Path) -> None:
        save_file({"weight": self.weight, "bias": self.bias}, folder / LINEAR_HEAD, metadata={"format": "pt"})


def read_linear_head(model: ModelConfig) -> LinearHead | None:
    """Reads the classifier next to a model; None if there is none. Raises ConfigError if it is damaged."""
    if (file := model_file(model, LINEAR_HEAD)) is None:
        return None
    found = load_weights(file)
    weight, bias = found.get("weight"), found.get("bias")
    if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ConfigError(
            f"{file} has no matrix `weight` and vector `bias` with a row for each label; export it again."
        )
    return LinearHead(weight.float(), bias.float())

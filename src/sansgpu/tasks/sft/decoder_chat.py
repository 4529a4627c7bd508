"""Uses chat models in GGUF files that our decoder computes, without transformers' models.

Their import alone takes seconds and as much memory as a small model.
"""

from __future__ import annotations

import numpy as np
import torch

from sansgpu.config import Config
from sansgpu.data.sequences import PackedSequences
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.formats.decoder_folder import load_gguf_decoder
from sansgpu.models.formats.gguf_source import is_gguf, open_gguf
from sansgpu.models.huggingface.packed_forward import token_places
from sansgpu.tasks.base import ObjectiveBase
from sansgpu.tasks.trained_model import ModelSource


class DecoderChat(ObjectiveBase):
    """Our decoder with the parts of an SFTObjective that use a model."""

    def __init__(self, config: Config, model: TransformerLM) -> None:
        self.config, self.model = config, model

    @classmethod
    def load(cls, source: ModelSource, config: Config) -> DecoderChat | None:
        """Loads a GGUF file. Returns None if `source` is another model, or one that our decoder does not compute."""
        if source.config is not None or not is_gguf(source.target):
            return None
        model = load_gguf_decoder(open_gguf(source.path))
        return None if model is None else cls(config, model)

    def plain_loss(self, batch: PackedSequences) -> torch.Tensor:
        """Computes the summed cross-entropy, ()."""
        documents, positions = token_places(batch.lengths)
        return self.model.summed_loss(batch.tokens[None], batch.targets[None], positions[None], documents[None])

    def ordered(self, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return indices

"""The objective of embedding models: similar vectors for texts of similar meaning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.machine.probe import mixed_precision
from sansgpu.models.huggingface.costs import PretrainedCosts
from sansgpu.models.huggingface.probes import output_width
from sansgpu.models.huggingface.sentence_embedding import (
    Dense,
    EmbeddingLayout,
    Pooling,
    pool,
    read_dense,
    read_layout,
    write_layout,
)
from sansgpu.models.huggingface.source import pretrained_config
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.base import TRAINING, ModelUse
from sansgpu.tasks.embed.data import tokenize
from sansgpu.tasks.embed.groups import TextGroups
from sansgpu.tasks.embed.losses import LossName, embedding_loss
from sansgpu.tasks.embed.settings import EmbeddingDataConfig, EmbeddingTrainingConfig
from sansgpu.tasks.fine_tuning import FineTuning, passes
from sansgpu.tasks.task import TrainedModel

USUAL_TEXTS = 2  # assumed texts per example if the data has not been read
DENSE = "sentence_dense"  # name of the Dense modules within the transformers model
DEFAULT_LENGTH = 256  # maximum tokens of a text if the model does not define it


class ComparedEmbeddings(ABC):
    """Base of objectives whose loss compares the embeddings of all texts in a step."""

    config: Config
    width: int  # dimensions of an embedding

    @property
    def dims(self) -> Sequence[int]:
        """The dimensions to which Matryoshka embeddings are truncated; empty without them."""
        return EmbeddingTrainingConfig.of(self.config).matryoshka_dims or ()

    def require_dims(self) -> None:
        """Raises ConfigError if the Matryoshka dimensions exceed those of the embeddings."""
        if self.dims and max(self.dims) > self.width:
            vectors = f"the vectors of {name}" if (name := self.config.model.name_or_path) else "the vectors"
            raise ConfigError(
                f"training.matryoshka_dims contains {max(self.dims)}, but {vectors} have only {self.width} dimensions; "
                "remove that value."
            )

    @property
    def loss_name(self) -> LossName:
        name = EmbeddingTrainingConfig.of(self.config).embedding_loss
        return "ranking" if name == "auto" else name

    @abstractmethod
    def vectors(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of concatenated texts, (S, D) fp32."""

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[TextGroups]) -> torch.Tensor:
        return embedding_loss(self.loss_name, self.dims, outputs, TextGroups.joined(batches))

    def summed_loss(self, batch: TextGroups) -> torch.Tensor:
        return self.step_loss(self.vectors(batch.tokens, batch.lengths), [batch])


class EmbeddingObjective(ComparedEmbeddings, FineTuning):
    """A base model whose hidden states are pooled to one embedding per text, and its loss."""

    head_type = "none"

    def __init__(self, config: Config, use: ModelUse = TRAINING) -> None:
        super().__init__(config, use)
        self.layout = embedding_layout(config, self.unpadded.causal)
        self._hidden_size = self.width = output_width(self.unpadded)
        self.dense = read_dense(config.model, self.layout, self.width)
        for module in self.dense:
            assert isinstance(module, Dense)
            self.width = len(module.weight)
        if len(self.dense):
            self.model.add_module(DENSE, self.dense)  # so that it is trained, and part of snapshots
        self.require_dims()

    def vectors(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return pool(self.unpadded.hidden_states(tokens, lengths), lengths, self.layout, self.dense)

    def outputs(self, batch: TextGroups) -> torch.Tensor:
        with self.forward_pass():
            return self.vectors(batch.tokens, batch.lengths)

    def export_to(self, tokenizer: Any, folder: Path, merge: bool | None = None) -> None:
        """Writes a Sentence Transformers folder, with the Dense modules in folders of their own."""
        self.model._modules.pop(DENSE, None)
        try:
            super().export_to(tokenizer, folder, merge)
        finally:
            if len(self.dense):
                self.model.add_module(DENSE, self.dense)

    def write_more(self, folder: Path) -> None:
        write_layout(self.layout, self._hidden_size, folder, self.dense)

    @classmethod
    def costs(cls, config: Config) -> PretrainedCosts:
        return replace(super().costs(config), window=USUAL_TEXTS * config.window)

    @classmethod
    def with_vocabulary(cls, config: Config) -> Config:
        """Sets data.max_length to the model's maximum unless the configuration has a value."""
        if config.data.max_length is not None:
            return config
        layout = read_layout(config.model)
        length = min(layout.max_length or DEFAULT_LENGTH if layout else DEFAULT_LENGTH, _longest(config))
        return config.with_values("data", max_length=length)


def _longest(config: Config) -> int:
    """Returns the model's maximum tokens: the smaller limit of its tokenizer and its config."""
    places = getattr(pretrained_config(config.model).get_text_config(), "max_position_embeddings", None)
    length = int(load_tokenizer_of(config.model).model_max_length)
    return min(length, places) if places else length


def embedding_layout(config: Config, causal: bool) -> EmbeddingLayout:
    """Returns the configured layout. Defaults are the model's own layout or, without one, the usual pooling."""
    model, known = config.model, read_layout(config.model)
    usual: Pooling = "last" if causal else "mean"
    normalize = known.normalize if known else EmbeddingTrainingConfig.of(config).embedding_loss != "triplet"
    pooling = model.pooling if model.pooling != "auto" else known.pooling if known else usual
    known = known or EmbeddingLayout(pooling, normalize)
    layout = replace(known, pooling=pooling, normalize=normalize, max_length=config.data.max_length)
    return with_prompts(layout, EmbeddingDataConfig.of(config))


def with_prompts(layout: EmbeddingLayout, data: EmbeddingDataConfig) -> EmbeddingLayout:
    """Returns a model's layout with the configured prompts."""
    if isinstance(data.prompts, dict):
        return replace(layout, prompts={**layout.prompts, **data.prompts})
    return layout if data.prompts == "auto" else replace(layout, prompts={}, default_prompt=None)


def encode_texts(loaded: TrainedModel, texts: Sequence[str], encoded: Callable[[int], None], prompt: str) -> np.ndarray:
    """Computes the embeddings for `Embeds.encode_texts`. Raises ConfigError if a text has no tokens."""
    tokens = tokenize(texts, loaded.tokenizer, loaded.config.window, prompt)
    if empty := next((number for number, ids in enumerate(tokens, 1) if not len(ids)), None):
        raise ConfigError(f"text {empty} has no tokens; remove it.")
    return encode_tokens(loaded, tokens, encoded)


def encode_tokens(
    loaded: TrainedModel, tokens: Sequence[np.ndarray], encoded: Callable[[int], None] = lambda done: None
) -> np.ndarray:
    """Returns the embeddings of tokenized texts, (S, D) float32; see `encode_texts`. Each text has a token."""
    vectors = np.empty((len(tokens), loaded.objective.width), np.float32)
    autocast = mixed_precision(loaded.device, loaded.precision)
    with torch.inference_mode(), autocast:
        lengths, done = np.array([len(ids) for ids in tokens]), 0
        encoded(done)
        for numbers in passes(lengths):
            flat = torch.from_numpy(np.concatenate([tokens[n] for n in numbers]).astype(np.int64)).to(loaded.device)
            own_lengths = torch.from_numpy(lengths[numbers]).to(loaded.device)
            vectors[numbers] = loaded.objective.vectors(flat, own_lengths).cpu().numpy()
            done += len(numbers)
            encoded(done)
    return vectors

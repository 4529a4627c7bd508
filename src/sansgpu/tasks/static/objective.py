"""The objective of static embeddings. S texts, N tokens in total, D dimensions of an embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.data.tokenizer import load_tokenizer, rows_needed
from sansgpu.models.huggingface.pretrained import seeded
from sansgpu.models.huggingface.sentence_embedding import EmbeddingLayout, is_static_folder
from sansgpu.models.huggingface.source import pretrained_config
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.base import EXPECTED_CHARACTERS, ObjectiveBase
from sansgpu.tasks.embed.groups import TextGroups
from sansgpu.tasks.embed.objective import USUAL_TEXTS, ComparedEmbeddings, with_prompts
from sansgpu.tasks.embed.settings import EmbeddingDataConfig, EmbeddingTrainingConfig
from sansgpu.tasks.evaluation import TokensOf
from sansgpu.tasks.fine_tuning import random_tokens
from sansgpu.tasks.static.costs import StaticCosts
from sansgpu.tasks.static.distill import DEFAULT_DIM, reduced_dim
from sansgpu.tasks.static.model import StaticFolder, StaticModel, read_static_folder, write_static_folder
from sansgpu.tasks.static.settings import StaticModelConfig
from sansgpu.tasks.static.words import TextTokenizer


class StaticObjective(ComparedEmbeddings, ObjectiveBase):
    """A table of embeddings, and the loss of the means of its rows."""

    def __init__(self, config: Config, random: bool = False, layers: int | None = None) -> None:
        """Initializes the table from the seed. `random` and `layers` have no effect, because there are no blocks."""
        self.config = config
        rows, width = config.model.vocab_size, StaticModelConfig.of(config).embedding_dim
        assert rows is not None
        assert width is not None
        with seeded(config.training.seed, "embeddings"):
            self.model = StaticModel(torch.randn(rows, width))
        self.layout, self.width = static_layout(config), width
        self.reader: TextTokenizer | None = None  # set for inference
        self.require_dims()

    def vectors(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, lengths, self.layout)  # type: ignore[no-any-return]

    def outputs(self, batch: TextGroups) -> torch.Tensor:
        return self.vectors(batch.tokens, batch.lengths)

    def loss(self, batch: TextGroups) -> torch.Tensor:
        return self.summed_loss(batch)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the embeddings of texts, (S, D) float32."""
        assert self.reader is not None
        tokens, lengths = (torch.from_numpy(part) for part in self.reader.encode(texts))
        return self.model.encode(tokens, lengths, self.layout).numpy()

    def ordered(self, indices: np.ndarray, lengths: np.ndarray, sequence: TokensOf | None = None) -> np.ndarray:
        """Returns `indices` unchanged, because texts are not padded."""
        return indices

    def between_blocks(self, callback: Callable[[], None]) -> None:
        """Ignores `callback`, so that it is only called between micro-batches."""

    def flops_of_token(self, example_tokens: float, target_ratio: float = 1.0) -> float:
        """Returns the training FLOPs per token for texts of `example_tokens` tokens on average."""
        costs = replace(self.costs(self.config), example_tokens=USUAL_TEXTS * example_tokens)
        return costs.work(1).needed

    def export_to(self, tokenizer: Any, folder: Path, merge: bool | None = None) -> None:
        """Writes a Sentence Transformers folder."""
        weights = self.model.embedding.weight.detach().float().cpu()
        write_static_folder(StaticFolder(weights, tokenizer.backend_tokenizer, self.layout), folder)

    @classmethod
    def costs(cls, config: Config) -> StaticCosts:
        length = USUAL_TEXTS * config.window
        return StaticCosts(StaticModelConfig.of(config), EmbeddingTrainingConfig.of(config), length, length)

    @classmethod
    def random_tokens(cls, config: Config, size: int, tokens: int | None) -> list[np.ndarray]:
        return random_tokens(config, cls.costs(config).vocabulary, size, tokens)

    @classmethod
    def with_vocabulary(cls, config: Config) -> Config:
        """Sets model.vocab_size and model.embedding_dim to those of the model that a run starts from.

        Without one, the vocabulary is an estimate until its tokenizer is trained. Raises ConfigError if the model
        cannot be read or has fewer dimensions than configured.
        """
        model = StaticModelConfig.of(config)
        if model.vocab_size is not None and model.embedding_dim is not None:
            return config  # a run's recorded configuration, whose base model may have been moved
        if (static := static_base(config)) is not None:
            rows, width = static.weights.shape
            if model.embedding_dim not in (None, width):
                raise ConfigError(
                    f"model.embedding_dim is {model.embedding_dim}, but the embeddings of {model.name_or_path} have "
                    f"{width} dimensions; remove it."
                )
        elif model.name_or_path is not None:
            rows = rows_needed(load_tokenizer_of(model).backend_tokenizer)
            width = int(pretrained_config(model).get_text_config().hidden_size)
            width = reduced_dim(model.embedding_dim, width, model.name_or_path)
        else:
            own = config.data.tokenizer
            rows = {"bpe": config.data.vocab_size, "char": EXPECTED_CHARACTERS}.get(own) or load_tokenizer(
                own
            ).vocab_size
            width = model.embedding_dim or DEFAULT_DIM
        return with_rows(config.with_values("model", embedding_dim=width), rows)


def with_rows(config: Config, rows: int) -> Config:
    """Sets model.vocab_size for a vocabulary of `rows` tokens. Raises ConfigError if it is set but too small."""
    size = config.model.vocab_size
    if size is not None and size < rows:
        raise ConfigError(f"model.vocab_size {size} is smaller than the vocabulary of {rows} tokens; remove it.")
    return config.with_values("model", vocab_size=size or rows)


def static_base(config: Config) -> StaticFolder | None:
    """Returns the static embedding model that a run starts from, or None. Raises ConfigError if it is invalid."""
    name = config.model.name_or_path
    folder = None if name is None else local_path(name)
    return read_static_folder(folder) if folder is not None and is_static_folder(folder) else None


def static_layout(config: Config) -> EmbeddingLayout:
    """Returns the layout of the static model that a run starts from, or that of a new one."""
    static, loss = static_base(config), EmbeddingTrainingConfig.of(config).embedding_loss
    layout = EmbeddingLayout("mean", loss != "triplet") if static is None else static.layout
    return with_prompts(layout, EmbeddingDataConfig.of(config))

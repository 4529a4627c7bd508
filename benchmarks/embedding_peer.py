"""Trains an embedding model with Sentence Transformers on the same rows in the same order; see fine_tuning_peer.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import transformers
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss

from benchmarks.peer_trainer import Watch, trainer_arguments
from sansgpu.config import Config
from sansgpu.data.forms.pairs import read_text_rows
from sansgpu.data.rows import BadRows
from sansgpu.data.sources import open_sources
from sansgpu.data.tables import Columns
from sansgpu.tasks.embed.groups import TextGroups

LOSSES = {"cosine": CosineSimilarityLoss, "ranking": MultipleNegativesRankingLoss}


def columns(config: Config) -> Dataset:
    """Reads the training rows: a column for each text, and one for the score if there is any."""
    rows = read_text_rows(open_sources(config.data).train.rows(), Columns.of(config.data), BadRows("fail"))
    texts = zip(*(row.texts for row in rows), strict=True)
    found: dict[str, list[Any]] = {f"text{number}": list(column) for number, column in enumerate(texts)}
    if config.data.score_scale is not None:
        found["score"] = [row.score / config.data.score_scale for row in rows if row.score is not None]
    return Dataset.from_dict(found)


def train(config: Config, given: list[TextGroups], save: str | None) -> Watch:
    """Trains on the rows of the batches `given`, writes the model to the folder `save`, and returns each step's time.

    Sentence Transformers tokenizes and pads texts when a batch is drawn.
    """

    class InOrder(DefaultBatchSampler):
        """Yields the row numbers of each batch, in sansgpu's order."""

        def __iter__(self) -> Iterator[list[int]]:
            return (batch.numbers.tolist() for batch in given)

        def __len__(self) -> int:
            return len(given)

    watch = Watch()
    transformers.set_seed(config.training.seed)
    model = SentenceTransformer(str(config.model.name_or_path), device="cpu")
    assert config.data.max_length is not None
    model.max_seq_length = config.data.max_length
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            **trainer_arguments(config, len(given)),
            per_device_train_batch_size=int(config.training.batch_size),
            batch_sampler=InOrder,
        )
        loss = LOSSES[config.training.embedding_loss](model)
        trainer = SentenceTransformerTrainer(model, arguments, columns(config), loss=loss, callbacks=[watch])
        trainer.train()
    if save is not None:
        model.save(save)
    return watch

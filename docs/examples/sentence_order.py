"""Sentence order prediction (ALBERT, arXiv 1909.11942): are two neighboring sentences in order, or swapped?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from sansgpu.config import Config, ConfigError, Metric, TaskSettings, derive_seed
from sansgpu.config.data import DataConfig
from sansgpu.data.order import generator
from sansgpu.data.rows import row_text
from sansgpu.data.sequences import LabeledSequences, PackedSequences
from sansgpu.data.shards import build_tokenizer
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.split import split_examples
from sansgpu.data.tokenizer import Tokenizer
from sansgpu.events.progress import ReportProgress
from sansgpu.tasks.base import TaskBase, with_vocabulary_of
from sansgpu.tasks.capabilities import Predicts
from sansgpu.tasks.evaluation import TokenizedCorpus
from sansgpu.tasks.graph.encoder import GraphEncoder
from sansgpu.tasks.graph.settings import GraphModelConfig
from sansgpu.tasks.task import Sums, TrainedModel

LABELS = ("in order", "swapped")
BERT = {"leaves": 0, "position_embedding": "learned", "decay": "none"}  # a graph encoder with these values is BERT


class PairsDataConfig(DataConfig):
    """The section `data` of this task, with its own key."""

    swap_ratio: float = Field(0.5, ge=0, le=1, description="fraction of the pairs whose sentences are swapped")


class OrderClassifier(nn.Module):
    """A bidirectional encoder. The hidden state of a pair's first token predicts its label."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = GraphModelConfig.of(config).model_copy(update=BERT)
        self.encoder = GraphEncoder(shape, derive_seed(config.training.seed, "model"))
        self.head = nn.Linear(config.model.d_model, len(LABELS), bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, batch: PackedSequences) -> torch.Tensor:
        """Returns logits, (B, 2)."""
        firsts = batch.lengths.cumsum(0) - batch.lengths
        positions = torch.arange(len(batch.tokens), device=firsts.device) - firsts.repeat_interleave(batch.lengths)
        nodes = F.pad(positions[:, None], (0, 1)).int()  # no leaves
        states = self.encoder.hidden(batch.tokens, nodes, batch.lengths)
        return self.head(self.encoder.predicted(states[firsts])).float()


class SentenceOrder(Predicts, TaskBase):
    """`task: sentence_order:SentenceOrder`."""

    settings = TaskSettings(
        "sentence_order:SentenceOrder",
        ("from scratch", "texts"),
        sections=(PairsDataConfig,),
        defaults={"model": {"activation": "gelu"}},
        metrics=(Metric("accuracy", form="{:.1%}", better="higher"),),
    )
    model_class = OrderClassifier

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, Any]:
        sources = open_sources(config.data)
        tokenizer = build_tokenizer(config.data, sources.train, cache, progress)
        texts = sentence_pairs(sources.train)
        contents = [" ".join(pair).encode() for pair in texts]
        chosen = split_examples(contents, np.ones(len(texts)), config.data.validation_split)
        parts = [[texts[number] for number in numbers] for numbers in chosen]
        if sources.validation is not None:
            parts = [texts, sentence_pairs(sources.validation)]
        draws = generator(config.training.seed, "swap")
        ratio = PairsDataConfig.of(config).swap_ratio
        swapped = [(draws.random(len(part)) < ratio).astype(np.int64) for part in parts]
        train, held = (joined(*pairs, tokenizer, config.window) for pairs in zip(parts, swapped, strict=True))
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(train)}-{len(held)}"
        config = with_vocabulary_of(config, tokenizer.vocab_size)
        return config, TokenizedCorpus(train, held, (), fingerprint, tokenizer)

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> PackedSequences:
        shape = (size, min(tokens or config.window, config.window))
        drawn = generator(config.training.seed, "trial").integers(config.model.vocab_size or 1, size=shape)
        return PackedSequences.of(list(drawn), np.zeros((size, 1)))

    def loss(self, batch: PackedSequences) -> torch.Tensor:
        return F.cross_entropy(self.model(batch), batch.targets[:, 0], reduction="sum")

    def evaluate(self, batch: PackedSequences) -> Sums:
        hits = self.model(batch).argmax(dim=1) == batch.targets[:, 0]
        return {"loss": float(self.loss(batch)), "hits": float(hits.sum()), "pairs": float(len(batch))}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["pairs"], "accuracy": sums["hits"] / sums["pairs"]}

    @classmethod
    def predict(cls, loaded: TrainedModel, rows: Sequence[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        texts = [(row_text(row, "first", "the data"), row_text(row, "second", "the data")) for row in rows]
        pairs = joined(texts, np.zeros(len(rows), np.int64), loaded.tokenizer, loaded.config.window)
        scores = loaded.objective.model(pairs.batch(np.arange(len(rows))).to(loaded.device)).softmax(dim=1)
        return [{"label": LABELS[int(row.argmax())], "score": float(row.max())} for row in scores]


def sentence_pairs(source: Source) -> list[tuple[str, str]]:
    """Returns all pairs of neighboring sentences in each document. Raises ConfigError if there are too few."""
    documents = (re.split(r"(?<=[.!?])\s+", piece.text.strip()) for piece in source.read())
    pairs = [pair for sentences in documents for pair in pairwise(sentences)]
    if len(pairs) < 2:
        raise ConfigError(f"{source.name} has {len(pairs)} pairs of sentences; add more text.")
    return pairs


def joined(texts: Sequence[tuple[str, str]], labels: np.ndarray, tokenizer: Tokenizer, window: int) -> LabeledSequences:
    """Tokenizes pairs of sentences, and swaps the two sentences if the label is 1."""
    pairs = [pair[::-1] if label else pair for pair, label in zip(texts, labels, strict=True)]
    halves = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1)]
    end = [tokenizer.end_id]
    tokens = [np.array([*end, *first, *end, *second][:window]) for first, second in zip(*halves, strict=True)]
    return LabeledSequences(tokens, labels[:, None])

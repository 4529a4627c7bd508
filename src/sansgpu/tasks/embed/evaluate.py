"""Evaluates embedding models: correlation of similarities with scores, or retrieval of positives.

D width of an embedding, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.kernels.linear import linear
from sansgpu.tasks.embed.groups import TextGroups, TokenizedGroups
from sansgpu.tasks.embed.losses import LossName, embedding_loss
from sansgpu.tasks.evaluation import OrderingObjective, SplitEvaluator
from sansgpu.tasks.task import Sums

QUERIES = 1024  # anchors that are ranked at a time, to bound the memory
NDCG_RANKS = 10


class Embedder(OrderingObjective, Protocol):
    """The interface of a model that computes embeddings; see `EmbeddingObjective`."""

    dims: Any
    width: int

    def outputs(self, batch: TextGroups) -> torch.Tensor: ...


class EmbeddingEvaluator(SplitEvaluator[Embedder, TokenizedGroups]):
    """Computes the embeddings of all texts in a split, and metrics from them.

    The loss is computed in batches of `batch_size` examples, as in training, in the order of the data.
    """

    def __init__(self, embedder: Embedder, part: TokenizedGroups, loss: LossName, batch_size: int) -> None:
        super().__init__(embedder, part)
        self._loss, self._batch_size = loss, batch_size
        self._vectors: dict[int, torch.Tensor] = {}  # (texts, D) of the examples evaluated so far, by index

    def validation_batches(self, size: int) -> Iterator[TextGroups]:
        self._vectors = {}
        return super().validation_batches(size)

    def evaluate(self, batch: TextGroups) -> Sums:
        """Stores the embeddings of a batch, because the metrics are not sums over batches."""
        vectors = self._objective.outputs(batch).cpu().split(batch.counts.tolist())
        self._vectors |= dict(zip(batch.numbers.tolist(), vectors, strict=True))
        return {}

    def gather(self, all_gather_rows: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        own = sorted(self._vectors)
        rows = [self._vectors[number] for number in own] or [torch.zeros(0, self._objective.width)]
        counts = torch.tensor([[number, len(self._vectors[number])] for number in own], dtype=torch.int64).reshape(
            -1, 2
        )
        for sizes, vectors in zip(all_gather_rows(counts), all_gather_rows(torch.cat(rows)), strict=True):
            self._vectors |= dict(zip(sizes[:, 0].tolist(), vectors.split(sizes[:, 1].tolist()), strict=True))

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Computes the loss, and correlations with scores or retrieval metrics."""
        numbers = np.array(sorted(self._vectors))
        texts = self._part.batch(numbers)
        vectors = torch.cat([self._vectors[number] for number in numbers])
        found = _correlations(vectors, texts) if self._part.scores is not None else _retrieval(vectors, texts)
        return {"loss": self._mean_loss(vectors, texts), **found, "rows": float(len(numbers))}

    def _mean_loss(self, vectors: torch.Tensor, texts: TextGroups) -> float:
        total, ends = 0.0, [0, *texts.counts.cumsum(0).tolist()]
        for start in range(0, len(texts), self._batch_size):
            stop = min(start + self._batch_size, len(texts))
            batch = texts.rows(start, stop)
            total += float(embedding_loss(self._loss, self._objective.dims, vectors[ends[start] : ends[stop]], batch))
        return total / len(texts)

    def detailed(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Adds the number of bad rows, which were skipped."""
        return {**metrics, "skipped": float(self._part.skipped)}


def _correlations(vectors: torch.Tensor, texts: TextGroups) -> dict[str, float]:
    """Computes the correlations between the cosine similarities of pairs and their scores."""
    from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef  # takes a second to import

    similarity = F.cosine_similarity(vectors[texts.starts], vectors[texts.starts + 1]).double()
    scores = texts.scores.double()
    return {
        "spearman": float(spearman_corrcoef(similarity, scores)),
        "pearson": float(pearson_corrcoef(similarity, scores)),
    }


def _retrieval(vectors: torch.Tensor, texts: TextGroups) -> dict[str, float]:
    """Ranks the positives of all examples by their similarity to each anchor.

    Excludes other positives of the same anchor, or with the same meaning as the anchor or its positive, because they
    are not wrong. Positives with the same similarity share their mean rank.
    """
    unit = F.normalize(vectors, dim=-1)
    anchors = texts.starts
    positives, meanings = unit[anchors + 1], texts.meanings[anchors + 1]
    ranks = []
    for queries in torch.arange(len(texts)).split(QUERIES):
        scores = linear(unit[anchors[queries]], positives)  # (Q, examples)
        own = scores[torch.arange(len(queries)), queries][:, None]
        asked = texts.meanings[anchors]
        alike = meanings == asked[queries][:, None]
        alike |= (meanings == meanings[queries][:, None]) | (asked == asked[queries][:, None])
        scores.masked_fill_(alike, -torch.inf)
        ranks.append(1 + (scores > own).sum(1) + 0.5 * (scores == own).sum(1))
    rank = torch.cat(ranks).double()
    gains = torch.where(rank <= NDCG_RANKS, 1 / torch.log2(1 + rank), 0.0)
    return {"mrr": float((1 / rank).mean()), "ndcg_at_10": float(gains.mean())}

"""Losses of embedding models, equal to those of Sentence Transformers on the same examples.

S texts, D width of an embedding, A anchors, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from sansgpu.config import ConfigError
from sansgpu.data.forms.pairs import KINDS, RowKind, TextRow
from sansgpu.kernels.linear import linear
from sansgpu.tasks.embed.groups import TextGroups

LossName = Literal["ranking", "cosine", "triplet"]
SCALE = 20.0  # factor of cosine similarities in the softmax, as in MultipleNegativesRankingLoss
MARGIN = 5.0  # minimum difference between the distances of negative and positive, as in TripletLoss


def loss_for(rows: Sequence[TextRow], asked: str) -> LossName:
    """Returns the name of the loss: `asked`, the configured one, or the default for the kind of the rows.

    Raises ConfigError if the configured loss does not fit the rows.
    """
    kind: RowKind = rows[0].kind
    if asked == "auto":
        return "cosine" if kind == "scores" else "ranking"
    if (asked == "cosine") != (kind == "scores") or (asked == "triplet" and kind != "pairs"):
        raise ConfigError(
            f"training.embedding_loss {asked} does not support the rows, which have {KINDS[kind]}; set it to auto."
        )
    if asked == "triplet" and (row := next((row for row in rows if len(row.texts) < 3), None)):
        raise row.error("it has no negative, which training.embedding_loss triplet requires")
    return asked  # type: ignore[return-value]


def embedding_loss(name: LossName, dims: Sequence[int], vectors: torch.Tensor, texts: TextGroups) -> torch.Tensor:
    """Returns the loss of embeddings (S, D), summed over examples, () fp32.

    With `dims` (Matryoshka), it is also summed over embeddings truncated to each of these widths.
    """
    with torch.autocast(vectors.device.type, enabled=False):
        if not dims:
            return _LOSSES[name](vectors, texts)
        cut = [F.normalize(vectors[:, :size], dim=-1) for size in sorted(dims, reverse=True)]
        return torch.stack([_LOSSES[name](part, texts) for part in cut]).sum()


def _ranking(vectors: torch.Tensor, texts: TextGroups) -> torch.Tensor:
    """Computes the cross-entropy of each anchor's positive among the positives and negatives of all examples.

    Other candidates with the same meaning as the anchor or its positive are excluded, and so are the positives of the
    same anchor in other examples.
    """
    anchors = texts.starts[texts.has_loss]
    is_candidate = torch.repeat_interleave(texts.has_loss, texts.counts)
    is_candidate[texts.starts] = False
    targets = (is_candidate.cumsum(0) - 1)[anchors + 1]
    unit = F.normalize(vectors, dim=-1)
    scores = SCALE * linear(unit[anchors], unit[is_candidate])  # (A, C)
    meanings, anchor_meanings = texts.meanings[is_candidate], texts.meanings[anchors]
    alike = (meanings == anchor_meanings[:, None]) | (meanings == texts.meanings[anchors + 1][:, None])
    alike[:, targets] |= anchor_meanings[:, None] == anchor_meanings
    alike[torch.arange(len(anchors), device=alike.device), targets] = False
    return F.cross_entropy(scores.masked_fill(alike, -torch.inf), targets, reduction="sum")


def _cosine(vectors: torch.Tensor, texts: TextGroups) -> torch.Tensor:
    first = texts.starts[texts.has_loss]
    similarity = F.cosine_similarity(vectors[first], vectors[first + 1])
    return (similarity - texts.scores[texts.has_loss]).square().sum()


def _triplet(vectors: torch.Tensor, texts: TextGroups) -> torch.Tensor:
    """Computes the triplet loss: the mean over an example's negatives, summed over examples."""
    examples = torch.repeat_interleave(torch.arange(len(texts), device=vectors.device), texts.counts)
    places = torch.arange(len(examples), device=vectors.device) - texts.starts[examples]
    negatives = torch.nonzero((places > 1) & texts.has_loss[examples])[:, 0]
    owners = examples[negatives]
    anchors = texts.starts[owners]
    near = F.pairwise_distance(vectors[anchors], vectors[anchors + 1])
    far = F.pairwise_distance(vectors[anchors], vectors[negatives])
    return (F.relu(near - far + MARGIN) / (texts.counts[owners] - 2)).sum()


_LOSSES: dict[LossName, Callable[[torch.Tensor, TextGroups], torch.Tensor]] = {
    "ranking": _ranking,
    "cosine": _cosine,
    "triplet": _triplet,
}

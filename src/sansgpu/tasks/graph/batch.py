"""Batches of leafy chain graphs, concatenated without padding. B examples, N nodes, M triples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sansgpu.data.batch import IGNORE, ExampleBatch, concatenated
from sansgpu.tasks.graph.leafy import LeafyExample
from sansgpu.tasks.graph.masking import MaskedExample

FACT = 3  # columns of a fact: head, relation, tail
# The columns of GraphBatch.triples.
RELATION, HEAD_START, HEAD_LENGTH, TAIL_START, TAIL_LENGTH, HEAD_ENTITY, QUERY_TAIL = range(7)
POSITION_FIELDS = 5  # the first five columns give a triple's position in the graph


@dataclass(frozen=True)
class GraphBatch(ExampleBatch):
    """B examples. Each has its roots first, then its leaves in the order of their roots."""

    tokens: torch.Tensor  # (N,) int64, masked
    targets: torch.Tensor  # (N,) int64, IGNORE for nodes without a loss
    nodes: torch.Tensor  # (N, 2) int32: index of the root; 0 for the root itself, 1 + slot for its leaves
    bounds: torch.Tensor  # (N, 2) int64: for a masked root the roots before and after its span, within the example
    lengths: torch.Tensor  # (B,) int64: nodes per example
    triples: torch.Tensor  # (M, 7) int64: relation, head's first root and number of tokens, tail's first node and
    # number of leaves, head entity, tail entity if it is the target of a query, else 0
    triple_counts: torch.Tensor  # (B,) int64
    facts: torch.Tensor  # (B, K, 3) int64: head, relation and tail of triples that are learned without text
    # Weights in the summed loss for roots, leaves, span boundaries, entity queries and facts.
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @classmethod
    def of(
        cls, examples: Sequence[LeafyExample], masked: Sequence[MaskedExample], facts: np.ndarray | None = None
    ) -> GraphBatch:
        """Builds a batch from examples, their masked versions and `facts` (B, K, 3)."""
        return cls(
            tokens=concatenated([m.tokens for m in masked]),
            targets=concatenated([m.targets for m in masked]),
            nodes=concatenated([_nodes(e) for e in examples], (2,)).int(),
            bounds=concatenated([m.bounds for m in masked], (2,)),
            lengths=torch.tensor([e.nodes for e in examples], dtype=torch.int64),
            triples=concatenated([_triples(e) for e in examples], (7,)),
            triple_counts=torch.tensor([len(e.placed) for e in examples], dtype=torch.int64),
            facts=torch.zeros(len(examples), 0, FACT, dtype=torch.int64) if facts is None else torch.from_numpy(facts),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_leaf(self) -> torch.Tensor:
        """Returns (N,) bool."""
        return self.nodes[:, 1] > 0

    def first_nodes(self) -> torch.Tensor:
        """Returns, for each node, the first node of its example, (N,)."""
        return torch.repeat_interleave(self.lengths.cumsum(0) - self.lengths, self.lengths)

    def placed_triples(self) -> torch.Tensor:
        """Returns `triples` (M, 7) with node indices relative to the batch instead of the example."""
        offset = torch.repeat_interleave(self.lengths.cumsum(0) - self.lengths, self.triple_counts)
        moved = self.triples.clone()
        moved[:, HEAD_START] += offset
        moved[:, TAIL_START] += offset
        return moved

    def counts(self) -> tuple[int, int]:
        """Returns the number of masked roots and of masked leaves."""
        chosen = self.targets != IGNORE
        leaves = int((chosen & self.is_leaf).sum())
        return int(chosen.sum()) - leaves, leaves

    @property
    def queries(self) -> int:
        """Returns the number of entity queries."""
        return int((self.triples[:, QUERY_TAIL] > 0).sum())

    @property
    def fact_count(self) -> int:
        """Returns the number of facts, B * K."""
        return self.facts.shape[0] * self.facts.shape[1]

    def target_count(self) -> int:
        """Returns the number of predicted tokens and entities, at least 1: the loss is divided by it."""
        return max(1, int((self.targets != IGNORE).sum()) + self.queries + self.fact_count)

    def token_count(self) -> int:
        return len(self.tokens)

    def weighed(self, mlm: float, mnm: float, pooled: bool, entity: float = 1.0) -> GraphBatch:
        """Returns the batch with weights such that the summed loss / `target_count` is the weighted sum of mean losses.

        With `pooled` there is one mean over all masked tokens, else one over roots and one over leaves. The boundary
        loss is a mean over roots; entity queries and facts each have their own mean.
        """
        roots, leaves = self.counts()
        total = self.target_count()
        per_root, per_leaf = total / max(1, roots), total / max(1, leaves)
        per_token = total / max(1, roots + leaves)
        weights = (mlm * per_token, mnm * per_token) if pooled else (mlm * per_root, mnm * per_leaf)
        per_entity = (entity * total / max(1, count) for count in (self.queries, self.fact_count))
        return replace(self, weights=(*weights, per_root, *per_entity))

    def rows(self, start: int, stop: int) -> GraphBatch:
        first, last = (int(self.lengths[:end].sum()) for end in (start, stop))
        begin, end = (int(self.triple_counts[:end].sum()) for end in (start, stop))
        return GraphBatch(
            self.tokens[first:last],
            self.targets[first:last],
            self.nodes[first:last],
            self.bounds[first:last],
            self.lengths[start:stop],
            self.triples[begin:end],
            self.triple_counts[start:stop],
            self.facts[start:stop],
            self.weights,
        )

    def without_targets(self, size: int) -> GraphBatch:
        first = self.rows(0, 1)
        triples = first.triples.clone()
        triples[:, QUERY_TAIL] = 0
        return replace(first, targets=torch.full_like(first.targets, IGNORE), triples=triples, facts=first.facts[:, :0])


def _nodes(example: LeafyExample) -> np.ndarray:
    roots = np.stack((np.arange(len(example.tokens)), np.zeros(len(example.tokens), np.int64)), axis=1)
    leaves = [np.stack((np.full(len(p.tail), p.root), 1 + np.arange(len(p.tail))), axis=1) for p in example.placed]
    return np.concatenate([roots, *leaves])


def _triples(example: LeafyExample) -> np.ndarray:
    sizes = np.array([len(p.tail) for p in example.placed], np.int64)
    tails = len(example.tokens) + np.cumsum(sizes) - sizes
    rows = [
        (p.relation, p.root, p.head_length, tail, len(p.tail), p.entities[0], p.entities[1] if p.is_query else 0)
        for p, tail in zip(example.placed, tails, strict=True)
    ]
    return np.array(rows, np.int64).reshape(-1, 7)

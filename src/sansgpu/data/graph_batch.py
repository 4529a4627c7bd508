"""Leafy chain graphs of one step, one behind the other: nothing is padded. B examples, N nodes, M triples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sansgpu.data.batch import IGNORE
from sansgpu.data.leafy import Leafy
from sansgpu.data.masking import Masked

FACT = 3  # numbers of a triple of entities: the head's, the relation's and the tail's
RELATION, PLACE, HEAD, TAIL, LEAVES, HEAD_ENTITY, ASKED = range(7)  # columns of GraphBatch.triples
PLACEMENT = 5  # of them say where a triple hangs


@dataclass(frozen=True)
class GraphBatch:
    """B examples. Of each first the roots, then the leaves in the order of their roots."""

    tokens: torch.Tensor  # (N,) int64, masked
    targets: torch.Tensor  # (N,) int64, IGNORE where nothing is predicted
    nodes: torch.Tensor  # (N, 2) int32: the root, and 0 of itself or 1 + slot of its leaf
    bounds: torch.Tensor  # (N, 2) int64: of a masked root the roots before and behind its span, within the example
    lengths: torch.Tensor  # (B,) int64: nodes of each example
    triples: torch.Tensor  # (M, 7) int64: relation, head's first root and tokens, tail's first node and leaves, the
    # head's entity, and the tail's where that is asked for, else 0
    triple_counts: torch.Tensor  # (B,) int64
    facts: torch.Tensor  # (B, K, 3) int64: head, relation and tail of triples that are learned without their texts
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)  # in the summed loss: of roots, leaves, spans' bounds,
    # entity queries, facts

    @classmethod
    def of(cls, examples: Sequence[Leafy], shown: Sequence[Masked], facts: np.ndarray | None = None) -> GraphBatch:
        """From examples, what is masked of them, and as many `facts` (K, 3) for each."""

        def joined(parts: Sequence[np.ndarray], width: tuple[int, ...] = ()) -> torch.Tensor:
            empty = np.zeros((0, *width), np.int64)
            return torch.from_numpy(np.concatenate([empty, *parts]))

        return cls(
            tokens=joined([m.tokens for m in shown]),
            targets=joined([m.targets for m in shown]),
            nodes=joined([_nodes(e) for e in examples], (2,)).int(),
            bounds=joined([m.bounds for m in shown], (2,)),
            lengths=torch.tensor([e.nodes for e in examples], dtype=torch.int64),
            triples=joined([_triples(e) for e in examples], (7,)),
            triple_counts=torch.tensor([len(e.placed) for e in examples], dtype=torch.int64),
            facts=torch.zeros(len(examples), 0, FACT, dtype=torch.int64) if facts is None else torch.from_numpy(facts),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_leaf(self) -> torch.Tensor:
        """(N,) bool."""
        return self.nodes[:, 1] > 0

    def first_nodes(self) -> torch.Tensor:
        """(N,): where the graph of each node begins."""
        return torch.repeat_interleave(self.lengths.cumsum(0) - self.lengths, self.lengths)

    def placed_triples(self) -> torch.Tensor:
        """(M, 7): `triples`, with nodes counted from the first of the batch."""
        offset = torch.repeat_interleave(self.lengths.cumsum(0) - self.lengths, self.triple_counts)
        moved = self.triples.clone()
        moved[:, PLACE] += offset
        moved[:, TAIL] += offset
        return moved

    def counts(self) -> tuple[int, int]:
        """Masked roots and masked leaves."""
        chosen = self.targets != IGNORE
        leaves = int((chosen & self.is_leaf).sum())
        return int(chosen.sum()) - leaves, leaves

    @property
    def queries(self) -> int:
        """Tails that are asked for among all entities."""
        return int((self.triples[:, ASKED] > 0).sum())

    @property
    def fact_count(self) -> int:
        """Triples that are learned without their texts."""
        return self.facts.shape[0] * self.facts.shape[1]

    def target_count(self) -> int:
        """Tokens and entities that are predicted; at least 1, as the loss is divided by it."""
        return max(1, int((self.targets != IGNORE).sum()) + self.queries + self.fact_count)

    def token_count(self) -> int:
        """Nodes that are read."""
        return len(self.tokens)

    def weighed(self, mlm: float, mnm: float, pooled: bool, entity: float = 1.0) -> GraphBatch:
        """The batch with weights that make the summed loss over `target_count` the loss of the whole batch.

        With `pooled` that is one mean over all tokens, else a mean over roots plus one over leaves. The mean of spans'
        bounds is over roots; entity queries and facts each have a mean of their own.
        """
        roots, leaves = self.counts()
        total = self.target_count()
        of_roots, of_leaves = total / max(1, roots), total / max(1, leaves)
        of_tokens = total / max(1, roots + leaves)
        weights = (mlm * of_tokens, mnm * of_tokens) if pooled else (mlm * of_roots, mnm * of_leaves)
        of_entities = (entity * total / max(1, count) for count in (self.queries, self.fact_count))
        return replace(self, weights=(*weights, of_roots, *of_entities))

    def rows(self, start: int, stop: int) -> GraphBatch:
        """Examples start..stop, fewer where there are no more."""
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

    def micro_batches(self, size: int, rank: int = 0, world_size: int = 1) -> Iterator[GraphBatch]:
        """This rank's share in pieces of `size`; every rank gets equally many, the last may be without targets."""
        stride = size * world_size
        for start in range(rank * size, -(-len(self) // stride) * stride, stride):
            yield self.rows(start, start + size) if start < len(self) else self.rows(0, 1).without_targets()

    def without_targets(self) -> GraphBatch:
        """The same examples, of which nothing is learned."""
        triples = self.triples.clone()
        triples[:, ASKED] = 0
        return replace(self, targets=torch.full_like(self.targets, IGNORE), triples=triples, facts=self.facts[:, :0])

    def to(self, device: torch.device) -> GraphBatch:
        """These examples on `device`."""
        return self._map(lambda value: value.to(device, non_blocking=True))

    def pinned(self) -> GraphBatch:
        """These examples in page-locked memory."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> GraphBatch:
        return GraphBatch(
            change(self.tokens),
            change(self.targets),
            change(self.nodes),
            change(self.bounds),
            change(self.lengths),
            change(self.triples),
            change(self.triple_counts),
            change(self.facts),
            self.weights,
        )


def _nodes(example: Leafy) -> np.ndarray:
    roots = np.stack((np.arange(len(example.tokens)), np.zeros(len(example.tokens), np.int64)), axis=1)
    leaves = [np.stack((np.full(len(p.tail), p.place), 1 + np.arange(len(p.tail))), axis=1) for p in example.placed]
    return np.concatenate([roots, *leaves])


def _triples(example: Leafy) -> np.ndarray:
    sizes = np.array([len(p.tail) for p in example.placed], np.int64)
    tails = len(example.tokens) + np.cumsum(sizes) - sizes
    rows = [
        (p.relation, p.place, p.head_length, tail, len(p.tail), p.entities[0], p.entities[1] if p.asked else 0)
        for p, tail in zip(example.placed, tails, strict=True)
    ]
    return np.array(rows, np.int64).reshape(-1, 7)

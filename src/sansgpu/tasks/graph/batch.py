"""Masking of leafy chain graphs (see leafy.py), and batches that concatenate them without padding.

The nodes of a graph are roots, the tokens of a text, and leaves, the tokens of tails. B examples, N nodes, M triples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from sansgpu.data.batch import IGNORE, ExampleBatch, concatenated
from sansgpu.data.order import generator
from sansgpu.tasks.graph.leafy import LeafyExample

SPAN_END_PROBABILITY = 0.2  # geometric span lengths of SpanBERT (arXiv 1907.10529)
MAX_DRAWS = 100  # attempts to place a masked span, per example
MASKED, RANDOM = 0.8, 0.1  # shares of the chosen tokens that become the mask or a random token; others stay (BERT)


@dataclass(frozen=True)
class MaskRules:
    """Masking settings."""

    ratio: float
    max_span: int
    leaf_ratio: float
    min_leaf_groups: int
    mask_id: int
    ordinary: np.ndarray  # ids that may be used as random replacements
    query_ratio: float = 0.0  # share of triples that become entity queries


class MaskedExample(NamedTuple):
    """An example after masking: R roots, then L leaves."""

    tokens: np.ndarray  # (R + L,)
    targets: np.ndarray  # (R + L,), IGNORE for nodes that are not masked
    bounds: np.ndarray  # (R + L, 2): for masked roots, the roots before and after their span


def add_entity_queries(example: LeafyExample, rules: MaskRules, seed: int, epoch: int, number: int) -> LeafyExample:
    """Turns random triples into entity queries for this epoch, in which one masked leaf replaces the tail."""
    if not rules.query_ratio:
        return example
    draws = generator(seed, "entity queries", epoch, number)
    is_query = draws.random(len(example.placed)) < rules.query_ratio
    mask = np.array([rules.mask_id], np.int64)
    placed = [
        p._replace(tail=mask, is_query=True) if ask and p.entities[1] else p
        for p, ask in zip(example.placed, is_query.tolist(), strict=True)
    ]
    return example._replace(placed=placed)


def mask_example(example: LeafyExample, rules: MaskRules, seed: int, epoch: int, number: int) -> MaskedExample:
    """Draws the masks of example `number` for an epoch."""
    draws = generator(seed, "masking", epoch, number)
    spans = _root_spans(example, rules, draws)
    groups = _leaf_groups(len(example.placed), rules, draws)
    leaves = [placed.tail for placed in example.placed]
    original = np.concatenate([example.tokens, *leaves])
    chosen = np.zeros(len(original), bool)
    bounds = np.zeros((len(original), 2), np.int64)
    for start, stop in spans:
        chosen[start:stop] = True
        bounds[start:stop] = start - 1, stop
    ends = len(example.tokens) + np.cumsum([len(leaf) for leaf in leaves], dtype=np.int64)
    for group in (group for group in groups if not example.placed[group].is_query):
        chosen[ends[group] - len(leaves[group]) : ends[group]] = True
    targets = np.where(chosen, original, IGNORE)
    return MaskedExample(_replaced(original, chosen, rules, draws), targets, bounds)


def _root_spans(example: LeafyExample, rules: MaskRules, draws: np.random.Generator) -> list[tuple[int, int]]:
    """Draws the masked spans [start, stop) of the text: whole words, or single tokens if max_span is 1."""
    roots = len(example.tokens)
    budget = int(rules.ratio * (roots - 2))
    if rules.max_span == 1:
        return [(int(p), int(p) + 1) for p in np.sort(draws.permutation(roots - 2)[:budget] + 1)]
    starts = np.flatnonzero(example.word_starts)
    taken = np.zeros(roots + 1, np.int64)  # cumulative number of masked tokens before each token
    masked, spans = np.zeros(roots, np.int64), []
    ends = np.append(starts[1:], roots - 1)  # the position after each word
    word_end = np.repeat(ends, np.diff(np.append(starts, roots - 1)))
    chances = (1 - SPAN_END_PROBABILITY) ** np.arange(rules.max_span)
    for _ in range(MAX_DRAWS):
        left = budget - int(taken[-1])
        if left <= 0:
            break
        length = min(1 + int(draws.choice(rules.max_span, p=chances / chances.sum())), left)
        fitting = starts[starts + length <= roots - 1]
        stops = word_end[fitting + length - 1 - starts[0]]
        free = (stops - fitting <= rules.max_span) & (taken[stops] == taken[fitting])
        if free.any():
            index = int(draws.choice(np.flatnonzero(free)))
            spans.append((int(fitting[index]), int(stops[index])))
            masked[spans[-1][0] : spans[-1][1]] = 1
            taken[1:] = masked.cumsum()
    return sorted(spans)


def _leaf_groups(groups: int, rules: MaskRules, draws: np.random.Generator) -> np.ndarray:
    """Draws the triples whose tails are masked, which always means all tokens of a tail."""
    chosen = np.flatnonzero(draws.random(groups) < rules.leaf_ratio)
    if len(chosen) < rules.min_leaf_groups and groups:
        return draws.integers(groups, size=1)
    return chosen


def _replaced(original: np.ndarray, chosen: np.ndarray, rules: MaskRules, draws: np.random.Generator) -> np.ndarray:
    fate, others = draws.random(len(original)), draws.choice(rules.ordinary, len(original))
    replaced = np.where(fate < MASKED, rules.mask_id, np.where(fate < MASKED + RANDOM, others, original))
    return np.where(chosen, replaced, original)


FACT = 3  # columns of a fact: head, relation, tail
# Columns of GraphBatch.triples.
RELATION, HEAD_START, HEAD_LENGTH, TAIL_START, TAIL_LENGTH, HEAD_ENTITY, QUERY_TAIL = range(7)
POSITION_FIELDS = 5  # the first five columns give a triple's position in the graph


@dataclass(frozen=True)
class GraphBatch(ExampleBatch):
    """B examples, each with its roots first and then its leaves in the order of their roots."""

    tokens: torch.Tensor  # (N,) int64, masked
    targets: torch.Tensor  # (N,) int64, IGNORE for nodes that are not masked
    nodes: torch.Tensor  # (N, 2) int32: index of the node's root; 0 for a root, 1 + slot for a leaf
    bounds: torch.Tensor  # (N, 2) int64: for masked roots, indices in the example of the roots around their span
    lengths: torch.Tensor  # (B,) int64: nodes per example
    triples: torch.Tensor  # (M, 7) int64: relation, head's first root and number of tokens, tail's first node and
    # number of leaves, head entity, tail entity if it is the target of a query, else 0
    triple_counts: torch.Tensor  # (B,) int64
    facts: torch.Tensor  # (B, K, 3) int64: head, relation and tail of triples to learn without text
    # Weights of roots, leaves, span boundaries, entity queries and facts: of each target in the summed loss, and of
    # each mean loss in the loss of a step.
    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    mean_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

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
        """Returns which nodes are leaves, (N,) bool."""
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
        """Returns the number of targets (tokens and entities), but at least 1, because the loss is divided by it."""
        return max(1, int((self.targets != IGNORE).sum()) + self.queries + self.fact_count)

    def token_count(self) -> int:
        return len(self.tokens)

    def weighed(self, mlm: float, mnm: float, pooled: bool, entity: float = 1.0) -> GraphBatch:
        """Sets weights with which the summed loss / `target_count` is a weighted sum of mean losses.

        With `pooled` there is one mean over all masked tokens, otherwise one over roots and one over leaves. The span
        boundary loss is a mean over roots; entity queries and facts each have a mean of their own.
        """
        roots, leaves = self.counts()
        total = self.target_count()
        per_root, per_leaf = total / max(1, roots), total / max(1, leaves)
        per_token = total / max(1, roots + leaves)
        weights = (mlm * per_token, mnm * per_token) if pooled else (mlm * per_root, mnm * per_leaf)
        per_entity = (entity * total / max(1, count) for count in (self.queries, self.fact_count))
        mean_weights = (mlm, mnm, 1.0, entity, entity)
        return replace(self, weights=(*weights, per_root, *per_entity), mean_weights=mean_weights)

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
            self.mean_weights,
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

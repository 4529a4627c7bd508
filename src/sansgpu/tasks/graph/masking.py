"""Masks tokens of the text and tails of triples. Every draw is a function of (seed, epoch, example)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sansgpu.data.batch import IGNORE
from sansgpu.data.order import generator
from sansgpu.tasks.graph.leafy import LeafyExample

SPAN_END_PROBABILITY = 0.2  # geometric span lengths of SpanBERT (arXiv 1907.10529)
MAX_DRAWS = 100  # draws of a span length per example
MASKED, RANDOM = 0.8, 0.1  # shares of chosen tokens replaced by the mask or a random token; the rest stays (BERT)


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
    targets: np.ndarray  # (R + L,), IGNORE for nodes without a loss
    bounds: np.ndarray  # (R + L, 2): the roots before and after the span of a masked root


def add_entity_queries(example: LeafyExample, rules: MaskRules, seed: int, epoch: int, number: int) -> LeafyExample:
    """Turns some triples into entity queries for this epoch: one masked leaf replaces the tail."""
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
    """Masks example `number` for an epoch."""
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
    taken = np.zeros(roots + 1, np.int64)  # number of masked tokens before each token
    masked, spans = np.zeros(roots, np.int64), []
    ends = np.append(starts[1:], roots - 1)  # the last position of each word
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
    """Draws the triples to mask; a tail is masked completely or not at all."""
    chosen = np.flatnonzero(draws.random(groups) < rules.leaf_ratio)
    if len(chosen) < rules.min_leaf_groups and groups:
        return draws.integers(groups, size=1)
    return chosen


def _replaced(original: np.ndarray, chosen: np.ndarray, rules: MaskRules, draws: np.random.Generator) -> np.ndarray:
    fate, others = draws.random(len(original)), draws.choice(rules.ordinary, len(original))
    replaced = np.where(fate < MASKED, rules.mask_id, np.where(fate < MASKED + RANDOM, others, original))
    return np.where(chosen, replaced, original)

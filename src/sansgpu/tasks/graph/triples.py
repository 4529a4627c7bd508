"""The known facts and the entities of a knowledge graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from sansgpu.data.forms.graphs import Entity, GraphDocument, Triple


class KnownFacts:
    """All known facts: the entities, distinguished by id and name, and the true tails of each head and relation.

    The frequencies of a relation's tails are counted in `trained`, the training documents; `others` are the remaining
    documents.
    """

    def __init__(self, trained: Iterable[GraphDocument], others: Iterable[GraphDocument]) -> None:
        learned, more = triples_of(trained), triples_of(others)
        triples = [*learned, *more]
        self.entities: list[Entity] = list(dict.fromkeys(entity for triple in triples for entity in triple.entities))
        self._number = {entity: number for number, entity in enumerate(self.entities)}
        self._of_key: dict[str, list[int]] = defaultdict(list)
        for number, (key, _) in enumerate(self.entities):
            self._of_key[key].append(number)
        self._tails: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        for head, relation, tail in (triple.key for triple in triples):
            self._tails[head, relation][tail] = None
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        for _, relation, tail in dict.fromkeys(triple.key for triple in learned):
            self._counts[relation][tail] += 1
        self.frequencies = lru_cache(maxsize=64)(self._frequencies)
        self.trained = frozenset(triple.fact for triple in learned)

    def tail(self, triple: Triple) -> int:
        """Returns the index of the triple's tail entity."""
        return self._number[triple.entities[1]]

    def others(self, triple: Triple) -> list[int]:
        """Returns the indices of the other true tails of the triple's head and relation."""
        gold, tails = self.tail(triple), self._tails[triple.key[:2]]
        return [number for key in tails for number in self._of_key[key] if number != gold]

    def _frequencies(self, relation: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns how often each entity is the relation's tail in the training data, (N,), and the sorted counts."""
        counts = self._counts[relation]
        found = np.array([counts[key] for key, _ in self.entities], np.int64)
        return found, np.sort(found)


def triples_of(documents: Iterable[GraphDocument]) -> list[Triple]:
    return [triple for document in documents for triple in document.triples]


def entities_of(documents: Iterable[GraphDocument]) -> list[Entity]:
    """Returns the heads and tails of all triples in order of first appearance."""
    triples = (triple for document in documents for triple in document.triples)
    return list(dict.fromkeys(entity for triple in triples for entity in triple.entities))

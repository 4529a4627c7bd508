"""Documents and triples of a knowledge graph, the training data of `task: graph`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np


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


INVERSE = "inverse of "  # prefix of the name of an inverse relation


class Triple(NamedTuple):
    """A (head, relation, tail) triple whose head occurs in the text."""

    head: str
    relation: str
    tail: str
    head_span: tuple[int, int] | None = None  # characters [start, end) of the text; None: search for the name
    head_id: str | None = None  # distinguishes entities with the same name; None: the name is the id
    tail_id: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns (head id, relation, tail id)."""
        return self.head_id or self.head, self.relation, self.tail_id or self.tail

    @property
    def entities(self) -> tuple[Entity, Entity]:
        return Entity(self.head_id or self.head, self.head), Entity(self.tail_id or self.tail, self.tail)

    @property
    def fact(self) -> tuple[str, str, str]:
        """Returns a key that a triple and its inverse share."""
        head, relation, tail = self.key
        return (tail, relation[len(INVERSE) :], head) if relation.startswith(INVERSE) else self.key


class GraphDocument(NamedTuple):
    """A text with its triples. Documents in the same `group` are in the same split."""

    id: str
    group: str
    text: str
    triples: tuple[Triple, ...] = ()
    entities: tuple[str, ...] = ()  # names of entities mentioned in the text, if known
    about: str | None = None  # id of the entity that the text describes, in a knowledge graph


class Entity(NamedTuple):
    """A node of the knowledge graph. Names need not be unique."""

    id: str
    name: str


def entities_of(documents: Iterable[GraphDocument]) -> list[Entity]:
    """Returns the heads and tails of all triples in order of first appearance."""
    triples = (triple for document in documents for triple in document.triples)
    return list(dict.fromkeys(entity for triple in triples for entity in triple.entities))

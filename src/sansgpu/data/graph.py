"""Documents and triples of a knowledge graph, the training data of `task: graph`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

INVERSE = "inverse of "  # prefix of the name of an inverse relation


class Triple(NamedTuple):
    """A (head, relation, tail) triple whose head occurs in the text."""

    head: str
    relation: str
    tail: str
    head_span: tuple[int, int] | None = None  # characters [start, end) of the text; None: search for the head
    head_id: str | None = None  # distinguishes entities with the same name; None: the name itself
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
    """A text with its triples. Documents of one `group` go to the same split."""

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

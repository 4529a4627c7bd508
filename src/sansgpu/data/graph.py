"""What is learned from by `task: graph`: texts with the triples that are said of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

INVERSE = "inverse of "  # begins the name of a relation that is asked from its tail


class Triple(NamedTuple):
    """A head that stands in the text, its relation, and what it is related to."""

    head: str
    relation: str
    tail: str
    head_span: tuple[int, int] | None = None  # characters of the text, end exclusive; None: where the head is found
    head_id: str | None = None  # what tells apart entities of one name; None: the name itself
    tail_id: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two triples the same fact."""
        return self.head_id or self.head, self.relation, self.tail_id or self.tail

    @property
    def entities(self) -> tuple[Entity, Entity]:
        """The head and the tail."""
        return Entity(self.head_id or self.head, self.head), Entity(self.tail_id or self.tail, self.tail)

    @property
    def fact(self) -> tuple[str, str, str]:
        """The same for a triple and its inverse."""
        head, relation, tail = self.key
        return (tail, relation[len(INVERSE) :], head) if relation.startswith(INVERSE) else self.key


class GraphDocument(NamedTuple):
    """A text with its triples. Documents of one `group` are all trained on or all held out."""

    id: str
    group: str
    text: str
    triples: tuple[Triple, ...] = ()
    entities: tuple[str, ...] = ()  # names of what the text speaks of, where that is known
    about: str | None = None  # the id of the entity that the text describes, in a knowledge graph


class Entity(NamedTuple):
    """A node of the knowledge graph. Two entities may share a name."""

    id: str
    name: str


def entities_of(documents: Iterable[GraphDocument]) -> list[Entity]:
    """The heads and tails of all triples, in the order in which they first appear."""
    triples = (triple for document in documents for triple in document.triples)
    return list(dict.fromkeys(entity for triple in triples for entity in triple.entities))

"""Builds leafy chain graphs (GraphMERT, arXiv 2510.09580) from texts with triples.

The tokens of a text are the roots, which form a chain. A triple is attached to the first token of its head: the tokens
of its tail become leaves of that root. A root has leaf slots for one triple. Empty leaf slots are never materialized.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import Encoding

from sansgpu.config.wording import counted
from sansgpu.data.forms.graphs import Entity, GraphDocument, Triple
from sansgpu.tasks.graph.tokenizer import MaskTokenizer

ENCODE_BATCH = 4096  # documents per call of the tokenizer

# Reasons for skipping a triple, as reported to the user.
LONG_TAIL, NO_HEAD, TAKEN = "the tail is too long", "the head is not in the text", "the head already has a triple"
NO_RELATION, KNOWN = "the relation is not in the training data", "the training data has the triple"


@dataclass(frozen=True)
class LeafyRules:
    """Limits for splitting texts into windows and attaching triples."""

    roots: int  # tokens of a window, including its first and last special token
    leaves: int  # maximum tokens of a tail
    stride: int = 0  # overlap of two windows in tokens
    triples: Literal["all", "first"] = "all"

    @property
    def step(self) -> int:
        """Returns the distance between the starts of two windows in tokens."""
        return max(1, self.roots - 2 - self.stride)


class PlacedTriple(NamedTuple):
    """A triple attached to a window. The tail's tokens fill leaf slots 0, 1, ... of the root with index `root`."""

    root: int
    head_length: int  # tokens of the head's name
    relation: int  # 1, 2, ...
    tail: np.ndarray  # token ids
    triple: Triple
    entities: tuple[int, int] = (0, 0)  # rows 1, 2, ... of head and tail in the entity table; 0: not in the table
    is_query: bool = False  # an entity query: one masked leaf replaces the tail


class LeafyExample(NamedTuple):
    """One example: a window with its triples, ordered by position."""

    tokens: np.ndarray  # int64, including the first and last special token
    word_starts: np.ndarray  # bool
    placed: list[PlacedTriple]

    @property
    def nodes(self) -> int:
        """Returns the number of roots and leaves."""
        return len(self.tokens) + sum(len(p.tail) for p in self.placed)


@dataclass
class LeafyDataset:
    """Examples, and counts of skipped triples."""

    windows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # tokens, word starts
    examples: list[tuple[int, list[PlacedTriple]]] = field(default_factory=list)  # index of the window, its triples
    dropped: Counter[str] = field(default_factory=Counter)  # skipped triples by reason
    document_triples: int = 0  # triples in the documents

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, number: int) -> LeafyExample:
        """Returns example 0, 1, ..."""
        window, placed = self.examples[number]
        tokens, word_starts = self.windows[window]
        return LeafyExample(tokens.astype(np.int64), word_starts, placed)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Returns the number of nodes of each example, (E,) int64. Cached: read it only after the last example."""
        sizes = (len(self.windows[w][0]) + sum(len(p.tail) for p in placed) for w, placed in self.examples)
        return np.fromiter(sizes, np.int64, len(self.examples))

    @property
    def triples(self) -> list[Triple]:
        """Returns the attached triples."""
        return [p.triple for _, placed in self.examples for p in placed]

    def note(self) -> str | None:
        """Returns a message with the number of skipped triples by reason, or None if none was skipped."""
        if not self.dropped:
            return None
        reasons = ", ".join(f"{count:,} because {reason}" for reason, count in sorted(self.dropped.items()))
        triples, windows = counted(self.document_triples, "triple"), counted(len(self.windows), "window")
        return f"{len(self.triples):,} of {triples} attached to {windows}; skipped: {reasons}"


class _Ids:
    """Ids 1, 2, ... of relations and entities."""

    def __init__(self, relations: Sequence[str], entities: Sequence[Entity]) -> None:
        self.relations = {name: number for number, name in enumerate(relations, 1)}
        self._entities = {entity: number for number, entity in enumerate(entities, 1)}

    def of(self, triple: Triple, tail: np.ndarray) -> tuple[int, np.ndarray, Triple, tuple[int, int]]:
        head, end = (self._entities.get(entity, 0) for entity in triple.entities)
        return self.relations[triple.relation], tail, triple, (head, end)


def relations_of(documents: Iterable[GraphDocument]) -> list[str]:
    """Returns the names of all relations in alphabetical order; ids start at 1."""
    return sorted({triple.relation for document in documents for triple in document.triples})


def build_leafy(
    documents: Iterable[GraphDocument],
    tokenizer: MaskTokenizer,
    relations: Sequence[str],
    rules: LeafyRules,
    known: frozenset[tuple[str, str, str]] = frozenset(),
    entities: Sequence[Entity] = (),
) -> LeafyDataset:
    """Splits documents into windows and attaches their triples, except those whose facts are `known`."""
    graphs, numbers = LeafyDataset(), _Ids(relations, entities)
    stream = iter(documents)
    while batch := list(islice(stream, ENCODE_BATCH)):
        triples = [_usable(document, numbers.relations, known, graphs) for document in batch]
        names = list(dict.fromkeys(t.tail for usable in triples for t in usable))
        tails = dict(zip(names, tokenizer.encode_names(names), strict=True))
        for document, usable, encoding in zip(
            batch, triples, tokenizer.encode_batch([d.text for d in batch]), strict=True
        ):
            if encoding.ids:
                _add(graphs, document, usable, encoding, tails, numbers, tokenizer, rules)
            else:
                graphs.dropped[NO_HEAD] += len(usable)
    return graphs


def _usable(
    document: GraphDocument, numbers: dict[str, int], known: frozenset[tuple[str, str, str]], graphs: LeafyDataset
) -> list[Triple]:
    usable = []
    for triple in document.triples:
        graphs.document_triples += 1
        if triple.relation not in numbers:
            graphs.dropped[NO_RELATION] += 1
        elif triple.fact in known:
            graphs.dropped[KNOWN] += 1
        else:
            usable.append(triple)
    return usable


def _add(
    graphs: LeafyDataset,
    document: GraphDocument,
    triples: list[Triple],
    encoding: Encoding,
    tails: dict[str, list[int]],
    numbers: _Ids,
    tokenizer: MaskTokenizer,
    rules: LeafyRules,
) -> None:
    """Adds the examples of one document. Windows in which a head has several triples become several examples."""
    spans = list(window_spans(len(encoding.ids), rules))
    # For each window a list of examples, each a dict from position to head and triple.
    by_window: list[list[dict[int, tuple[str, PlacedTriple]]]] = [[] for _ in spans]
    text = TokenText(document.text, encoding)
    for triple in triples:
        tail = tails[triple.tail]
        if not 1 <= len(tail) <= rules.leaves:
            graphs.dropped[LONG_TAIL] += 1
            continue
        found = next(token_positions(text.mentions(triple), spans, rules), None)
        if found is None:
            graphs.dropped[NO_HEAD] += 1
            continue
        window, root, length = found
        placed = PlacedTriple(root, length, *numbers.of(triple, np.array(tail, np.int64)))
        if not _put(by_window[window], triple.head, placed, rules.triples == "first"):
            graphs.dropped[TAKEN] += 1
    words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
    begins = np.concatenate([[True], words[1:] != words[:-1]])
    ids = np.array(encoding.ids, np.int32)
    for (start, stop), examples in zip(spans, by_window, strict=True):
        tokens = tokenizer.enclosed(ids[start:stop]).astype(np.int32)
        word_starts = np.concatenate([[False], begins[start:stop], [False]])
        word_starts[1] = True  # the rest of a word that the window cuts counts as a word
        number = len(graphs.windows)
        graphs.windows.append((tokens, word_starts))
        for example in examples or [{}]:
            graphs.examples.append((number, [example[root][1] for root in sorted(example)]))


def window_spans(tokens: int, rules: LeafyRules) -> Iterator[tuple[int, int]]:
    """Yields the range [start, stop) of each window of a text with `tokens` tokens."""
    room = rules.roots - 2
    for start in range(0, max(1, tokens - room + rules.step), rules.step):
        yield start, min(tokens, start + room)


def _put(
    examples: list[dict[int, tuple[str, PlacedTriple]]], head: str, placed: PlacedTriple, first_only: bool
) -> bool:
    """Adds a triple to the first example in which its root and its head are free. Returns False if it is skipped."""
    for example in examples:
        if placed.root not in example and all(name != head for name, _ in example.values()):
            example[placed.root] = (head, placed)
            return True
    if examples and first_only:
        return False
    examples.append({placed.root: (head, placed)})
    return True


def token_positions(
    mentions: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]], rules: LeafyRules
) -> Iterator[tuple[int, int, int]]:
    """Yields (window, root, number of tokens) for each mention and each window that contains all of it."""
    for first, last in mentions:
        first_window = max(0, -((rules.roots - 2 - last) // rules.step))
        for window in range(first_window, min(len(spans), first // rules.step + 1)):
            yield window, first - spans[window][0] + 1, last - first


class TokenText:
    """Maps characters of a text to its tokens."""

    def __init__(self, text: str, encoding: Encoding) -> None:
        self._text = text
        self._starts = [start for start, _ in encoding.offsets]
        self._ends = [end for _, end in encoding.offsets]

    def mentions(self, triple: Triple) -> Iterator[tuple[int, int]]:
        """Yields the token ranges [first, last) of a triple's head: its span, or else all exact matches in the text."""
        if triple.head_span is not None:
            yield from self._tokens(*triple.head_span)
            return
        start = -1
        while (start := self._text.find(triple.head, start + 1)) >= 0:
            for first, last in self._tokens(start, start + len(triple.head)):
                if self._matches_exactly(first, last, start, start + len(triple.head)):
                    yield first, last

    def _tokens(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the range of tokens that overlap characters [start, end), if any."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first < last:
            yield first, last

    def _matches_exactly(self, first: int, last: int, start: int, end: int) -> bool:
        """Returns whether the tokens cover exactly the mention, apart from one leading space or sign."""
        before = self._text[self._starts[first] : start]
        return len(before) <= 1 and not before.isalnum() and self._ends[last - 1] == end

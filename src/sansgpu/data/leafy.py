"""Texts with triples -> leafy chain graphs (GraphMERT, arXiv 2510.09580).

A text's tokens are roots, one behind the other. A triple hangs on the first token of its head: the tokens of its tail
are leaves of that root, which has room for one triple. Leaf slots that stay empty are never made.
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

from sansgpu.data.graph import Entity, GraphDocument, Triple
from sansgpu.data.mask_tokenizer import MaskTokenizer

ENCODED_AT_ONCE = 4096  # documents

# Why a triple is not learned, as it is told.
LONG_TAIL, NO_HEAD, TAKEN = "the tail is too long", "the head is not in the text", "the head has another triple"
NO_RELATION, KNOWN = "the relation is not trained on", "it is trained on"


@dataclass(frozen=True)
class LeafyRules:
    """How windows are cut, and what hangs on them."""

    roots: int  # tokens of a window, with the one that begins and the one that ends it
    leaves: int  # tokens that a tail may have
    stride: int = 0  # tokens that two windows of a text share
    triples: Literal["all", "first"] = "all"

    @property
    def step(self) -> int:
        """Tokens from one window's beginning to the next one's."""
        return max(1, self.roots - 2 - self.stride)


class Placed(NamedTuple):
    """A triple in its window. The tail's leaves are slots 0, 1, ... of the root at `place`."""

    place: int
    head_length: int  # in tokens
    relation: int  # 1, 2, ...
    tail: np.ndarray  # token ids
    triple: Triple
    entities: tuple[int, int] = (0, 0)  # numbers 1, 2, ... of the head and the tail; 0: not in the entity table
    asked: bool = False  # an entity query: one masked leaf stands in place of the tail


class Leafy(NamedTuple):
    """One example: a window, and the triples it holds at a time, in the order of their places."""

    tokens: np.ndarray  # int64, with those that begin and end it
    word_starts: np.ndarray  # bool
    placed: list[Placed]

    @property
    def nodes(self) -> int:
        """Roots and leaves."""
        return len(self.tokens) + sum(len(p.tail) for p in self.placed)


@dataclass
class LeafyGraphs:
    """Examples, and what was left out."""

    windows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # tokens, word starts
    examples: list[tuple[int, list[Placed]]] = field(default_factory=list)  # window, its triples
    dropped: Counter[str] = field(default_factory=Counter)  # triples, by why
    asked: int = 0  # triples that the documents have

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, number: int) -> Leafy:
        """Number 0, 1, ..."""
        window, placed = self.examples[number]
        tokens, word_starts = self.windows[window]
        return Leafy(tokens.astype(np.int64), word_starts, placed)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Nodes of each example, once all are there; (E,) int64."""
        sizes = (len(self.windows[w][0]) + sum(len(p.tail) for p in placed) for w, placed in self.examples)
        return np.fromiter(sizes, np.int64, len(self.examples))

    @property
    def triples(self) -> list[Triple]:
        """Those that are placed."""
        return [p.triple for _, placed in self.examples for p in placed]

    def note(self) -> str | None:
        """How many triples were left out, and why; None where none was."""
        if not self.dropped:
            return None
        said = ", ".join(f"{count:,} because {why}" for why, count in sorted(self.dropped.items()))
        return f"{len(self.triples):,} of {self.asked:,} triples hang on {len(self.windows):,} windows; left out {said}"


class _Numbers:
    """Numbers 1, 2, ... of relations and entities."""

    def __init__(self, relations: Sequence[str], entities: Sequence[Entity]) -> None:
        self.relations = {name: number for number, name in enumerate(relations, 1)}
        self._entities = {entity: number for number, entity in enumerate(entities, 1)}

    def of(self, triple: Triple, tail: np.ndarray) -> tuple[int, np.ndarray, Triple, tuple[int, int]]:
        head, end = (self._entities.get(entity, 0) for entity in triple.entities)
        return self.relations[triple.relation], tail, triple, (head, end)


def relations_of(documents: Iterable[GraphDocument]) -> list[str]:
    """Names of the relations, in alphabetical order: number 1 is the first."""
    return sorted({triple.relation for document in documents for triple in document.triples})


def build_leafy(
    documents: Iterable[GraphDocument],
    tokenizer: MaskTokenizer,
    relations: Sequence[str],
    rules: LeafyRules,
    known: frozenset[tuple[str, str, str]] = frozenset(),
    entities: Sequence[Entity] = (),
) -> LeafyGraphs:
    """Cut documents into windows and hang their triples on them, but for those whose facts are `known`."""
    graphs, numbers = LeafyGraphs(), _Numbers(relations, entities)
    stream = iter(documents)
    while batch := list(islice(stream, ENCODED_AT_ONCE)):
        triples = [_usable(document, numbers.relations, known, graphs) for document in batch]
        names = list(dict.fromkeys(t.tail for kept in triples for t in kept))
        tails = dict(zip(names, tokenizer.encode_names(names), strict=True))
        for document, kept, encoding in zip(
            batch, triples, tokenizer.encode_batch([d.text for d in batch]), strict=True
        ):
            if encoding.ids:
                _add(graphs, document, kept, encoding, tails, numbers, tokenizer, rules)
            else:
                graphs.dropped[NO_HEAD] += len(kept)
    return graphs


def _usable(
    document: GraphDocument, numbers: dict[str, int], known: frozenset[tuple[str, str, str]], graphs: LeafyGraphs
) -> list[Triple]:
    kept = []
    for triple in document.triples:
        graphs.asked += 1
        if triple.relation not in numbers:
            graphs.dropped[NO_RELATION] += 1
        elif triple.fact in known:
            graphs.dropped[KNOWN] += 1
        else:
            kept.append(triple)
    return kept


def _add(
    graphs: LeafyGraphs,
    document: GraphDocument,
    triples: list[Triple],
    encoding: Encoding,
    tails: dict[str, list[int]],
    numbers: _Numbers,
    tokenizer: MaskTokenizer,
    rules: LeafyRules,
) -> None:
    """The windows of one document, each as often as its heads have triples."""
    spans = list(window_spans(len(encoding.ids), rules))
    rounds: list[list[dict[int, tuple[str, Placed]]]] = [[] for _ in spans]  # by window: by place, head and triple
    text = TokenText(document.text, encoding)
    for triple in triples:
        tail = tails[triple.tail]
        if not 1 <= len(tail) <= rules.leaves:
            graphs.dropped[LONG_TAIL] += 1
            continue
        found = next(places_of(text.mentions(triple), spans, rules), None)
        if found is None:
            graphs.dropped[NO_HEAD] += 1
            continue
        window, place, length = found
        put = Placed(place, length, *numbers.of(triple, np.array(tail, np.int64)))
        if not _put(rounds[window], triple.head, put, rules.triples == "first"):
            graphs.dropped[TAKEN] += 1
    words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
    begins = np.concatenate([[True], words[1:] != words[:-1]])
    ids = np.array(encoding.ids, np.int32)
    for (start, stop), turns in zip(spans, rounds, strict=True):
        tokens = tokenizer.enclosed(ids[start:stop]).astype(np.int32)
        word_starts = np.concatenate([[False], begins[start:stop], [False]])
        word_starts[1] = True  # the rest of a word that is cut counts as one
        number = len(graphs.windows)
        graphs.windows.append((tokens, word_starts))
        for turn in turns or [{}]:
            graphs.examples.append((number, [turn[place][1] for place in sorted(turn)]))


def window_spans(tokens: int, rules: LeafyRules) -> Iterator[tuple[int, int]]:
    """[start, stop) of each window of a text of so many tokens."""
    room = rules.roots - 2
    for start in range(0, max(1, tokens - room + rules.step), rules.step):
        yield start, min(tokens, start + room)


def _put(turns: list[dict[int, tuple[str, Placed]]], head: str, put: Placed, first_only: bool) -> bool:
    """Put a triple into the first turn in which its root and its head are free."""
    for turn in turns:
        if put.place not in turn and all(name != head for name, _ in turn.values()):
            turn[put.place] = (head, put)
            return True
    if turns and first_only:
        return False
    turns.append({put.place: (head, put)})
    return True


def places_of(
    mentions: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]], rules: LeafyRules
) -> Iterator[tuple[int, int, int]]:
    """(window, root, tokens) of each mention in each of the windows that holds it whole."""
    for first, last in mentions:
        ends_behind = max(0, -((rules.roots - 2 - last) // rules.step))
        for window in range(ends_behind, min(len(spans), first // rules.step + 1)):
            yield window, first - spans[window][0] + 1, last - first


class TokenText:
    """Where in the tokens something stands."""

    def __init__(self, text: str, encoding: Encoding) -> None:
        self._text = text
        self._starts = [start for start, _ in encoding.offsets]
        self._ends = [end for _, end in encoding.offsets]

    def mentions(self, triple: Triple) -> Iterator[tuple[int, int]]:
        """[first, last) tokens of the head: at its span, or wherever whole tokens spell it."""
        if triple.head_span is not None:
            yield from self._tokens(*triple.head_span)
            return
        place = -1
        while (place := self._text.find(triple.head, place + 1)) >= 0:
            for first, last in self._tokens(place, place + len(triple.head)):
                if self._is_whole(first, last, place, place + len(triple.head)):
                    yield first, last

    def _tokens(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The tokens that share a character with [start, end)."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first < last:
            yield first, last

    def _is_whole(self, first: int, last: int, start: int, end: int) -> bool:
        """Whether tokens begin and end where the mention does, but for the one character a word's token may begin
        with: the space or the sign before it.
        """
        before = self._text[self._starts[first] : start]
        return len(before) <= 1 and not before.isalnum() and self._ends[last - 1] == end

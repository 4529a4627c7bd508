"""Extracts triples from texts: an encoder predicts the tail of each (head, relation, ?) question.

In the GraphMERT paper, a language model combines predicted tokens into tails. Here, beam search finds the tails, or
they are chosen from given names. The score of a tail is the mean log-probability of its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from sansgpu.data.forms.graphs import INVERSE, GraphDocument, Triple
from sansgpu.events.progress import ReportProgress
from sansgpu.tasks.graph.leafy import LeafyRules, TokenText, token_positions, window_spans
from sansgpu.tasks.graph.tail_prediction import (
    BeamSearch,
    EntityTableIndex,
    PredictedTail,
    TailPredictor,
    TailQuery,
    candidates_of,
    normal,
)
from sansgpu.tasks.graph.tokenizer import GraphCodec, MaskTokenizer

QUESTIONS = 4096  # questions to collect from documents before the model runs on them
DECIMALS = 4  # decimal places of printed scores
_NO_FLOOR = float("-inf")
_LEADING_SIGN = re.compile(r"^\W")  # the first token of a word may include a sign


@dataclass(frozen=True)
class ExtractionRules:
    """Settings of an extraction: which questions to ask about a document, and which answers to accept."""

    windows: LeafyRules
    relations: tuple[str, ...]  # the model's relations in training order: the first has id 1
    only: tuple[str, ...] = ()  # relations to extract; empty: all except inverse ones
    heads: tuple[str, ...] = ()  # empty: each document's entities, else the heads of its triples, else its words
    closed: bool = False  # choose tails from the document's entities, or from `tails` if the document has no entities
    tails: tuple[str, ...] = ()
    beams: int = 10
    per_query: int = 1  # number of tails per head, relation and window
    min_score: float | None = None

    @property
    def wanted_relations(self) -> tuple[str, ...]:
        """Returns the relations to extract."""
        return self.only or tuple(name for name in self.relations if not name.startswith(INVERSE))

    def asks(self, triple: Triple) -> bool:
        """Returns whether a triple matches `heads` and `only`."""
        named = not self.heads or normal(triple.head) in map(normal, self.heads)
        return named and (not self.only or triple.relation in self.only)


class ExtractedTriple(NamedTuple):
    """An extracted triple."""

    head: str
    relation: str
    tail: str
    score: float  # mean log-probability of the tail's tokens, rounded


class DocumentTriples(NamedTuple):
    """The triples extracted from a document, and the best tail for each head and relation of its own triples."""

    document: GraphDocument
    triples: list[ExtractedTriple]
    given: dict[tuple[str, str], str | None]  # None if the head is not in the text or the relation is unknown


class _Query(NamedTuple):
    """A head mention in a window, and a relation."""

    window: int
    root: int
    head_length: int
    relation: str


@dataclass
class _DocumentQueries:
    """The queries of one document."""

    document: GraphDocument
    questions: dict[_Query, TailQuery] = field(default_factory=dict)
    floors: dict[_Query, float] = field(default_factory=dict)  # minimum score of a useful tail
    heads: list[tuple[str, _Query]] = field(default_factory=list)
    given: dict[tuple[str, str], _Query | None] = field(default_factory=dict)

    def ask(self, query: _Query, question: TailQuery, floor: float) -> None:
        """Adds a question. A repeated question keeps the lowest floor."""
        self.questions[query] = question
        self.floors[query] = min(floor, self.floors.get(query, floor))

    def head_names(self) -> dict[_Query, str]:
        """Returns the head of every question."""
        given = {query: head for (head, _), query in self.given.items() if query is not None}
        return given | {query: head for head, query in self.heads}


class TripleExtractor:
    """Extracts triples from texts with an encoder."""

    def __init__(self, predictor: TailPredictor, codec: GraphCodec, rules: ExtractionRules) -> None:
        self._predictor, self._codec, self._tokenizer, self._rules = predictor, codec, codec.tokenizer, rules
        self._table = EntityTableIndex(codec.entities)
        self._numbers = {name: number for number, name in enumerate(rules.relations, 1)}
        self._search = BeamSearch(predictor, codec.tokenizer, rules.windows.leaves, rules.beams, rules.per_query)
        self._names = candidates_of(predictor, codec, self._table, rules.windows.leaves, rules.tails)

    def read(self, documents: Sequence[GraphDocument], progress: ReportProgress) -> Iterator[DocumentTriples]:
        """Yields the extracted triples of each document, in order."""
        batch: list[_DocumentQueries] = []
        for number, document in enumerate(documents, 1):
            batch.append(self._document_queries(document))
            if number == len(documents) or sum(len(queries.questions) for queries in batch) >= QUESTIONS:
                for queries, answers in zip(batch, self._answers(batch), strict=True):
                    yield self._extracted(queries, answers)
                batch = []
                progress("reading documents", number, len(documents), "document")

    def _document_queries(self, document: GraphDocument) -> _DocumentQueries:
        """Builds queries for all heads, windows and relations, and for the document's own triples."""
        encoding = self._tokenizer.encode_batch([document.text])[0]
        text = _WindowedText(document.text, encoding, self._tokenizer, self._rules.windows)
        queries = _DocumentQueries(document)
        least = self._rules.min_score
        floor = _NO_FLOOR if least is None else least - 10**-DECIMALS  # scores are rounded before the comparison
        for head in self._heads(document, encoding):
            entity = self._table.number(head.entities[0])
            for found in text.first_mentions(head):
                for relation in self._rules.wanted_relations:
                    query = _Query(*found, relation)
                    queries.heads.append((head.head, query))
                    queries.ask(query, text.question(query, self._numbers[relation], entity), floor)
        for triple in document.triples:
            pair = triple.head, triple.relation
            if self._rules.asks(triple) and pair not in queries.given:
                where = next(text.first_mentions(triple), None) if triple.relation in self._numbers else None
                queries.given[pair] = None
                if where is not None:
                    queries.given[pair] = query = _Query(*where, triple.relation)
                    entity = self._table.number(triple.entities[0])
                    queries.ask(query, text.question(query, self._numbers[triple.relation], entity), _NO_FLOOR)
        return queries

    def _heads(self, document: GraphDocument, encoding: Encoding) -> list[Triple]:
        """Returns the distinct heads to query, as triples of which only the head is used."""
        names = self._rules.heads or document.entities
        if not names and document.triples:
            firsts: dict[str, Triple] = {}
            for triple in document.triples:
                firsts.setdefault(triple.head, triple)
            return list(firsts.values())
        return [Triple(name, "", "") for name in dict.fromkeys(names or _words(document.text, encoding))]

    def _answers(self, batch: list[_DocumentQueries]) -> list[dict[_Query, list[PredictedTail]]]:
        """Returns the best tails of every query, per document."""
        if self._rules.closed:
            return [self._chosen(queries) for queries in batch]
        questions = [question for queries in batch for question in queries.questions.values()]
        floors = [queries.floors[query] for queries in batch for query in queries.questions]
        found = iter(self._search.predict_tails(questions, np.array(floors)))
        return [{query: next(found) for query in queries.questions} for queries in batch]

    def _chosen(self, queries: _DocumentQueries) -> dict[_Query, list[PredictedTail]]:
        """Returns the best candidate names for every query, without the head's own name."""
        entities, leaves = queries.document.entities, self._rules.windows.leaves
        names = self._names
        if entities:
            names = candidates_of(self._predictor, self._codec, self._table, leaves, entities)
        keys, questions, heads = list(queries.questions), list(queries.questions.values()), queries.head_names()
        answers: dict[_Query, list[PredictedTail]] = {}
        for start, stop in names.pieces(self._predictor, questions):
            scores = names.scores(self._predictor, questions[start:stop]).numpy()
            for query, row in zip(keys[start:stop], scores, strict=True):
                answers[query] = names.best(row, self._rules.per_query, heads[query])
        return answers

    def _extracted(self, queries: _DocumentQueries, answers: dict[_Query, list[PredictedTail]]) -> DocumentTriples:
        """Returns the distinct triples of a document with their best scores, if these reach `min_score`."""
        best: dict[tuple[str, str, str], float] = {}
        for head, query in queries.heads:
            for tail in answers[query]:
                key = head, query.relation, tail.text
                best[key] = max(best.get(key, _NO_FLOOR), round(tail.score, DECIMALS))
        least = _NO_FLOOR if self._rules.min_score is None else self._rules.min_score
        triples = [ExtractedTriple(*key, score) for key, score in best.items() if score >= least]
        given = {pair: answers[query] if query else [] for pair, query in queries.given.items()}
        first = {pair: tails[0].text if tails else None for pair, tails in given.items()}
        return DocumentTriples(queries.document, triples, first)


class _WindowedText:
    """A text split into windows, which maps mentions to token positions in the windows."""

    def __init__(self, text: str, encoding: Encoding, tokenizer: MaskTokenizer, rules: LeafyRules) -> None:
        self._text, self._tokenizer, self._rules = TokenText(text, encoding), tokenizer, rules
        self._ids = np.array(encoding.ids, np.int64)
        self._windows = list(window_spans(len(encoding.ids), rules)) if encoding.ids else []

    def first_mentions(self, head: Triple) -> Iterator[tuple[int, int, int]]:
        """Yields (window, root, tokens) of the first complete mention of the head in each window."""
        found: dict[int, None] = {}
        for window, root, tokens in token_positions(self._text.mentions(head), self._windows, self._rules):
            if window not in found:
                found[window] = None
                yield window, root, tokens

    def question(self, query: _Query, relation: int, entity: int) -> TailQuery:
        start, stop = self._windows[query.window]
        tokens = self._tokenizer.enclosed(self._ids[start:stop])
        return TailQuery(tokens, query.root, query.head_length, relation, entity)


def _words(text: str, encoding: Encoding) -> Iterable[str]:
    """Returns the words that have letters, in order."""
    ends: dict[int, tuple[int, int]] = {}
    for word, (start, end) in zip(encoding.word_ids, encoding.offsets, strict=True):
        if word is not None:
            ends[word] = ends.get(word, (start, end))[0], end
    words = (_LEADING_SIGN.sub("", text[start:end].strip()) for start, end in ends.values())
    return (word for word in words if any(letter.isalpha() for letter in word))


class Agreement:
    """Compares extracted triples with the documents' own triples, ignoring case."""

    def __init__(self, tokenizer: MaskTokenizer, rules: ExtractionRules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self._documents = self._triples = self._gold = 0
        self._scored: list[tuple[float, bool]] = []  # for each triple: (score, whether it is correct)
        self._given: list[bool | None] = []  # per head and relation: is the best tail correct; None: no query

    def add(self, extracted: DocumentTriples) -> None:
        """Adds the result of one document."""
        self._documents += 1
        self._triples += len(extracted.triples)
        matching = [triple for triple in extracted.document.triples if self._rules.asks(triple)]
        tails = self._spelled([t.tail for t in matching] + [f.tail for f in extracted.triples])
        gold = {(normal(t.head), t.relation, tails[t.tail]): None for t in matching}
        found: dict[tuple[str, str, str], float] = {}
        for head, relation, tail, score in extracted.triples:
            key = normal(head), relation, tails[tail]
            found[key] = max(score, found.get(key, _NO_FLOOR))
        self._gold += len(gold)
        self._scored += [(score, key in gold) for key, score in found.items()]
        for (head, relation), best in extracted.given.items():
            right = best and (normal(head), relation, self._spelled([best])[best]) in gold
            self._given.append(None if best is None else bool(right))

    def _spelled(self, tails: Iterable[str]) -> dict[str, str]:
        """Normalizes tails by encoding and decoding them, so that tails with the same tokens compare equal."""
        names = list(dict.fromkeys(tails))
        ids = self._tokenizer.encode_names(names)
        return {name: normal(self._tokenizer.decode(tokens)) for name, tokens in zip(names, ids, strict=True)}

    def summary(self) -> dict[str, Any]:
        """Returns counts and, if the documents have triples, precision, recall and F1 of the extracted triples.

        `given` is the accuracy of the best tail for the documents' own (head, relation) pairs. Without `min_score`, the
        result has the best F1 over all thresholds, which is optimistic because it is selected on the same documents.
        """
        counts: dict[str, Any] = {"documents": self._documents, "triples": self._triples}
        if not self._gold:
            return counts
        right = sum(hit for _, hit in self._scored)
        hits = [hit for hit in self._given if hit is not None]
        summary = counts | {"gold": self._gold, **_f1(right, len(self._scored), self._gold)}
        summary["given"] = {"accuracy": sum(hits) / len(self._given), "pairs": len(self._given), "asked": len(hits)}
        return summary if self._rules.min_score is not None else summary | self._best()

    def _best(self) -> dict[str, Any]:
        """Returns the best F1 over all score thresholds."""
        best, score, right = 0.0, None, 0
        ordered = sorted(self._scored, reverse=True)
        for count, (least, hit) in enumerate(ordered, 1):
            right += hit
            if count == len(ordered) or ordered[count][0] < least:
                f1 = _f1(right, count, self._gold)["f1"]
                best, score = (f1, least) if f1 > best else (best, score)
        return {"best_f1": best, "best_min_score": score, "best_chosen_on": "these documents"}


def _f1(right: int, found: int, gold: int) -> dict[str, float]:
    return {
        "precision": right / found if found else 0.0,
        "recall": right / gold,
        "f1": 2 * right / (found + gold),
    }

"""Triples read from texts: of a head and a relation the tails that an encoder would put on its leaves.

In place of the published way, which has a language model join tokens into tails, tails are searched token by token
with a beam, or chosen from names that are given. A tail's score is the mean log-probability of its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from sansgpu.data.graph import INVERSE, GraphDocument, Triple
from sansgpu.data.leafy import LeafyRules, TokenText, places_of, window_spans
from sansgpu.data.mask_tokenizer import GraphCodec, MaskTokenizer
from sansgpu.data.shards import Progress
from sansgpu.tasks.candidates import EntityTableIndex, candidates_of, normal
from sansgpu.tasks.gaps import BeamSearch, GapFiller, Question, Tail

QUESTIONS = 4096  # that are gathered of several documents before they are asked
DECIMALS = 4  # of a score
_ANY = float("-inf")  # a floor that is none
_SIGN_BEFORE = re.compile(r"^\W")  # a word's token may begin with one


@dataclass(frozen=True)
class ExtractionRules:
    """What is asked of each document, and which answers are given."""

    windows: LeafyRules
    relations: tuple[str, ...]  # as they were trained on: number 1 is the first
    only: tuple[str, ...] = ()  # of the relations; none: all but inverse ones
    heads: tuple[str, ...] = ()  # none: each document's entities, else the heads of its triples, else its words
    closed: bool = False  # tails are chosen from the document's entities, or where it names none from `tails`
    tails: tuple[str, ...] = ()
    beams: int = 10
    per_query: int = 1  # tails of a head and a relation in a window
    min_score: float | None = None

    @property
    def asked(self) -> tuple[str, ...]:
        """The relations that every head is asked for."""
        return self.only or tuple(name for name in self.relations if not name.startswith(INVERSE))

    def asks(self, triple: Triple) -> bool:
        """Whether a triple is one of those that are looked for."""
        named = not self.heads or normal(triple.head) in map(normal, self.heads)
        return named and (not self.only or triple.relation in self.only)


class Found(NamedTuple):
    """A triple that was read from a text."""

    head: str
    relation: str
    tail: str
    score: float  # mean log-probability of the tail's tokens, rounded


class Extracted(NamedTuple):
    """What was read from a document, and the best tail of each head and relation that it has a triple of."""

    document: GraphDocument
    triples: list[Found]
    given: dict[tuple[str, str], str | None]  # None: the head is not in the text, or the relation not trained on


class _Place(NamedTuple):
    """What is asked."""

    window: int
    root: int
    head_length: int
    relation: str


@dataclass
class _Sheet:
    """The questions of one document."""

    document: GraphDocument
    questions: dict[_Place, Question] = field(default_factory=dict)
    floors: dict[_Place, float] = field(default_factory=dict)  # a tail of a lower score is of no use
    heads: list[tuple[str, _Place]] = field(default_factory=list)
    given: dict[tuple[str, str], _Place | None] = field(default_factory=dict)

    def ask(self, place: _Place, question: Question, floor: float) -> None:
        """Once, with the lowest floor of all who ask."""
        self.questions[place] = question
        self.floors[place] = min(floor, self.floors.get(place, floor))

    def asked_of(self) -> dict[_Place, str]:
        """The head of every question."""
        given = {place: head for (head, _), place in self.given.items() if place is not None}
        return given | {place: head for head, place in self.heads}


class Extraction:
    """An encoder that reads triples from texts."""

    def __init__(self, filler: GapFiller, codec: GraphCodec, rules: ExtractionRules) -> None:
        self._filler, self._codec, self._tokenizer, self._rules = filler, codec, codec.tokenizer, rules
        self._table = EntityTableIndex(codec.entities)
        self._numbers = {name: number for number, name in enumerate(rules.relations, 1)}
        self._search = BeamSearch(filler, codec.tokenizer, rules.windows.leaves, rules.beams, rules.per_query)
        self._names = candidates_of(filler, codec, self._table, rules.windows.leaves, rules.tails)

    def read(self, documents: Sequence[GraphDocument], progress: Progress) -> Iterator[Extracted]:
        """What is found in each document, in order."""
        sheets: list[_Sheet] = []
        for number, document in enumerate(documents, 1):
            sheets.append(self._sheet(document))
            if number == len(documents) or sum(len(sheet.questions) for sheet in sheets) >= QUESTIONS:
                for sheet, answers in zip(sheets, self._answers(sheets), strict=True):
                    yield self._extracted(sheet, answers)
                sheets = []
                progress("reading texts", number, len(documents))

    def _sheet(self, document: GraphDocument) -> _Sheet:
        """Every head in every window that holds it, with every relation; and what the document's own triples ask."""
        encoding = self._tokenizer.encode_batch([document.text])[0]
        page, sheet = _Page(document.text, encoding, self._tokenizer, self._rules.windows), _Sheet(document)
        least = self._rules.min_score
        floor = _ANY if least is None else least - 10**-DECIMALS  # scores are rounded before they are compared
        for head in self._heads(document, encoding):
            entity = self._table.number(head.entities[0])
            for found in page.once_a_window(head):
                for relation in self._rules.asked:
                    place = _Place(*found, relation)
                    sheet.heads.append((head.head, place))
                    sheet.ask(place, page.question(place, self._numbers[relation], entity), floor)
        for triple in document.triples:
            pair = triple.head, triple.relation
            if self._rules.asks(triple) and pair not in sheet.given:
                where = next(page.once_a_window(triple), None) if triple.relation in self._numbers else None
                sheet.given[pair] = None
                if where is not None:
                    sheet.given[pair] = place = _Place(*where, triple.relation)
                    entity = self._table.number(triple.entities[0])
                    sheet.ask(place, page.question(place, self._numbers[triple.relation], entity), _ANY)
        return sheet

    def _heads(self, document: GraphDocument, encoding: Encoding) -> list[Triple]:
        """Heads to ask for, each name once; what else these triples hold is of no account."""
        names = self._rules.heads or document.entities
        if not names and document.triples:
            firsts: dict[str, Triple] = {}
            for triple in document.triples:
                firsts.setdefault(triple.head, triple)
            return list(firsts.values())
        return [Triple(name, "", "") for name in dict.fromkeys(names or _words(document.text, encoding))]

    def _answers(self, sheets: list[_Sheet]) -> list[dict[_Place, list[Tail]]]:
        """The best tails of every question."""
        if self._rules.closed:
            return [self._chosen(sheet) for sheet in sheets]
        questions = [question for sheet in sheets for question in sheet.questions.values()]
        floors = [sheet.floors[place] for sheet in sheets for place in sheet.questions]
        found = iter(self._search.tails(questions, np.array(floors)))
        return [{place: next(found) for place in sheet.questions} for sheet in sheets]

    def _chosen(self, sheet: _Sheet) -> dict[_Place, list[Tail]]:
        """The best of the names that may be tails, the head's own left out."""
        entities, leaves = sheet.document.entities, self._rules.windows.leaves
        names = self._names
        if entities:
            names = candidates_of(self._filler, self._codec, self._table, leaves, entities)
        places, questions, heads = list(sheet.questions), list(sheet.questions.values()), sheet.asked_of()
        answers: dict[_Place, list[Tail]] = {}
        for start, stop in names.pieces(self._filler, questions):
            scores = names.scores(self._filler, questions[start:stop]).numpy()
            for place, row in zip(places[start:stop], scores, strict=True):
                answers[place] = names.best(row, self._rules.per_query, heads[place])
        return answers

    def _extracted(self, sheet: _Sheet, answers: dict[_Place, list[Tail]]) -> Extracted:
        """The triples of a document, each once with its better score, where that is high enough."""
        best: dict[tuple[str, str, str], float] = {}
        for head, place in sheet.heads:
            for tail in answers[place]:
                key = head, place.relation, tail.text
                best[key] = max(best.get(key, _ANY), round(tail.score, DECIMALS))
        least = _ANY if self._rules.min_score is None else self._rules.min_score
        triples = [Found(*key, score) for key, score in best.items() if score >= least]
        given = {pair: answers[place] if place else [] for pair, place in sheet.given.items()}
        first = {pair: tails[0].text if tails else None for pair, tails in given.items()}
        return Extracted(sheet.document, triples, first)


class _Page:
    """A text cut into windows, and where in them something stands."""

    def __init__(self, text: str, encoding: Encoding, tokenizer: MaskTokenizer, rules: LeafyRules) -> None:
        self._text, self._tokenizer, self._rules = TokenText(text, encoding), tokenizer, rules
        self._ids = np.array(encoding.ids, np.int64)
        self._windows = list(window_spans(len(encoding.ids), rules)) if encoding.ids else []

    def once_a_window(self, head: Triple) -> Iterator[tuple[int, int, int]]:
        """(window, root, tokens) of the head's first mention in every window that holds one whole."""
        found: dict[int, None] = {}
        for window, root, tokens in places_of(self._text.mentions(head), self._windows, self._rules):
            if window not in found:
                found[window] = None
                yield window, root, tokens

    def question(self, place: _Place, relation: int, entity: int) -> Question:
        """What is asked at a place."""
        start, stop = self._windows[place.window]
        tokens = self._tokenizer.enclosed(self._ids[start:stop])
        return Question(tokens, place.root, place.head_length, relation, entity)


def _words(text: str, encoding: Encoding) -> Iterable[str]:
    """Words that have letters, in order."""
    ends: dict[int, tuple[int, int]] = {}
    for word, (start, end) in zip(encoding.word_ids, encoding.offsets, strict=True):
        if word is not None:
            ends[word] = ends.get(word, (start, end))[0], end
    words = (_SIGN_BEFORE.sub("", text[start:end].strip()) for start, end in ends.values())
    return (word for word in words if any(letter.isalpha() for letter in word))


class Agreement:
    """How well what was read agrees with the documents' own triples; names are compared without capitals."""

    def __init__(self, tokenizer: MaskTokenizer, rules: ExtractionRules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self._documents = self._triples = self._gold = 0
        self._scored: list[tuple[float, bool]] = []  # of each triple, and whether it is right
        self._given: list[bool | None] = []  # of each head and relation: the best tail is right; None: not asked

    def add(self, extracted: Extracted) -> None:
        """What was read from one document."""
        self._documents += 1
        self._triples += len(extracted.triples)
        asked = [triple for triple in extracted.document.triples if self._rules.asks(triple)]
        tails = self._spelled([t.tail for t in asked] + [f.tail for f in extracted.triples])
        gold = {(normal(t.head), t.relation, tails[t.tail]): None for t in asked}
        found: dict[tuple[str, str, str], float] = {}
        for head, relation, tail, score in extracted.triples:
            key = normal(head), relation, tails[tail]
            found[key] = max(score, found.get(key, _ANY))
        self._gold += len(gold)
        self._scored += [(score, key in gold) for key, score in found.items()]
        for (head, relation), best in extracted.given.items():
            right = best and (normal(head), relation, self._spelled([best])[best]) in gold
            self._given.append(None if best is None else bool(right))

    def _spelled(self, tails: Iterable[str]) -> dict[str, str]:
        """Tails as the tokenizer writes them: what it cannot tell apart is equal."""
        names = list(dict.fromkeys(tails))
        ids = self._tokenizer.encode_names(names)
        return {name: normal(self._tokenizer.decode(tokens)) for name, tokens in zip(names, ids, strict=True)}

    def summary(self) -> dict[str, Any]:
        """Counts; where the documents have triples also precision, recall and F1 of all that was given out, and the
        share of their heads and relations whose best tail is right.

        Without a least score also the best F1 that one would have given; chosen on these very documents, it is too
        good to be expected of others.
        """
        counts: dict[str, Any] = {"documents": self._documents, "triples": self._triples}
        if not self._gold:
            return counts
        right = sum(hit for _, hit in self._scored)
        asked = [hit for hit in self._given if hit is not None]
        summary = counts | {"gold": self._gold, **_f1(right, len(self._scored), self._gold)}
        summary["given"] = {"accuracy": sum(asked) / len(self._given), "pairs": len(self._given), "asked": len(asked)}
        return summary if self._rules.min_score is not None else summary | self._best()

    def _best(self) -> dict[str, Any]:
        """The F1 of the least score that serves these documents best."""
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

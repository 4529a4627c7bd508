"""Scores a given list of names as tails of (head, relation, ?) questions.

Q questions, S columns of scores, L leaves, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
import torch

from sansgpu.tasks.graph.tail_prediction import NONE, PredictedTail, TailPredictor, TailQuery
from sansgpu.tasks.graph.tokenizer import GraphCodec, MaskTokenizer
from sansgpu.tasks.graph.triples import Entity


def normal(text: str) -> str:
    """Normalizes a name for comparison: case-folded, with single spaces."""
    return " ".join(text.split()).casefold()


class Candidates(ABC):
    """Candidate tails. Names that the model cannot distinguish share a column of scores.

    `column` is the column of each name, or -1 if it cannot be scored; `columns` is the number of columns.
    """

    def __init__(self, names: Sequence[str], keys: Sequence[Hashable | None], columns: Sequence[Hashable]) -> None:
        numbers = {key: number for number, key in enumerate(columns)}
        self.names, self._same = tuple(names), defaultdict[str, list[int]](list)
        for number, name in enumerate(names):
            self._same[normal(name)].append(number)
        self.column = np.array([-1 if key is None else numbers[key] for key in keys], np.int64)
        self.columns = len(columns)
        self._first = np.full(len(columns), len(names))  # the first name of each column
        np.minimum.at(self._first, self.column[self.column >= 0], np.flatnonzero(self.column >= 0))

    @abstractmethod
    def pieces(self, predictor: TailPredictor, questions: Sequence[TailQuery]) -> Iterator[tuple[int, int]]:
        """Yields the ranges [start, stop) of questions for which one call of `scores` fits into memory."""

    @abstractmethod
    def scores(self, predictor: TailPredictor, questions: Sequence[TailQuery]) -> torch.Tensor:
        """Returns the log-probability of each column, (Q, S) fp32 on the CPU."""

    def best(self, scores: np.ndarray, count: int, without: str) -> list[PredictedTail]:
        """Returns the `count` best distinct names by scores (S,), best first, except the name `without`."""
        columns = self.column[self._same.get(normal(without), [])]
        scores = scores.copy()
        scores[columns[columns >= 0]] = NONE
        found: dict[str, PredictedTail] = {}
        for number in sorted(range(len(scores)), key=lambda n: (-scores[n], n)):
            if len(found) == count or scores[number] == NONE:
                break
            name = self.names[self._first[number]]
            found.setdefault(name, PredictedTail(name, float(scores[number])))
        return list(found.values())


class SpelledCandidates(Candidates):
    """Candidates scored by the mean log-probability of their tokens on masked leaves."""

    def __init__(self, tokenizer: MaskTokenizer, names: Sequence[str], leaves: int) -> None:
        ids = [tuple(tokens) for tokens in tokenizer.encode_names(names)]
        keys = [tokens if 1 <= len(tokens) <= leaves else None for tokens in ids]
        distinct = sorted(dict.fromkeys(key for key in keys if key is not None), key=len)
        super().__init__(names, keys, distinct)
        self._leaves = leaves
        self._by_length: list[torch.Tensor] = []  # (names, L), in the order of their columns
        for length in range(1, leaves + 1):
            if rows := [tokens for tokens in distinct if len(tokens) == length]:
                self._by_length.append(torch.tensor(rows))

    def pieces(self, predictor: TailPredictor, questions: Sequence[TailQuery]) -> Iterator[tuple[int, int]]:
        return predictor.pieces(questions, self._leaves, self._leaves * predictor.vocabulary + 2 * self.columns)

    def scores(self, predictor: TailPredictor, questions: Sequence[TailQuery]) -> torch.Tensor:
        found = [torch.zeros(len(questions), 0)]
        for rows in self._by_length:  # one forward pass for each number of tokens
            length = rows.shape[1]
            log_probs = predictor.log_probabilities(questions, predictor.empty(questions, length)).cpu()
            total = log_probs[:, 0].index_select(1, rows[:, 0])
            for slot in range(1, length):
                total += log_probs[:, slot].index_select(1, rows[:, slot])
            found.append(total / length)
        return torch.cat(found, dim=1)


class EntityCandidates(Candidates):
    """Candidates scored by the similarity of their entity vectors to the model's prediction on a single masked leaf.

    The vector of an entity outside the model's table depends only on the tokens of its name.
    """

    def __init__(
        self, predictor: TailPredictor, tokenizer: MaskTokenizer, table: EntityTableIndex, entities: Sequence[Entity]
    ):
        names = [entity.name for entity in entities]
        ids = [tuple(tokens) for tokens in tokenizer.encode_names(names)]
        keys = [(number, tokens) for number, tokens in zip(map(table.number, entities), ids, strict=True)]
        distinct = list(dict.fromkeys(keys))
        super().__init__(names, keys, distinct)
        with torch.no_grad(), predictor.head_precision():
            self._table = predictor.objective.entity_vectors()
        self._vectors = predictor.candidate_vectors(
            [tokens for _, tokens in distinct], [number for number, _ in distinct]
        )

    def pieces(self, predictor: TailPredictor, questions: Sequence[TailQuery]) -> Iterator[tuple[int, int]]:
        return predictor.pieces(questions, 1, 3 * self.columns)

    def scores(self, predictor: TailPredictor, questions: Sequence[TailQuery]) -> torch.Tensor:
        """Returns log-probabilities normalized over the candidates, (Q, S) fp32 on the CPU, from one forward pass."""
        return predictor.entity_log_probabilities(questions, self._vectors, self._table).cpu()


class EntityTableIndex:
    """Maps entities to their rows 1, 2, ... in the model's entity table."""

    def __init__(self, entities: Sequence[Entity]) -> None:
        self._numbers = {entity: number for number, entity in enumerate(entities, 1)}
        self._named = defaultdict[str, list[Entity]](list)
        for entity in entities:
            self._named[entity.name].append(entity)

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, entity: Entity) -> int:
        """Returns the row of an entity, or of the only entity with its name; 0 if there is neither."""
        named = self._named.get(entity.name, [])
        only = self._numbers[named[0]] if len(named) == 1 else 0
        return self._numbers.get(entity, only)

    def named(self, names: Iterable[str]) -> list[Entity]:
        """Returns all entities with these names; a name that is not in the table becomes a new entity."""
        return [entity for name in names for entity in self._named.get(name, [Entity(name, name)])]


def candidates_of(
    predictor: TailPredictor, codec: GraphCodec, table: EntityTableIndex, leaves: int, names: Sequence[str]
) -> Candidates:
    """Builds candidates that use the model's entity table if it has one, else the tokens of the names."""
    if table:
        return EntityCandidates(predictor, codec.tokenizer, table, table.named(names))
    return SpelledCandidates(codec.tokenizer, names, leaves)

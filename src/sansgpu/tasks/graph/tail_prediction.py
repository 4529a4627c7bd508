"""Predicts the tails of (head, relation, ?) questions on masked leaves, by beam search or among candidates.

Q questions, L leaves per question, V vocabulary, S candidates, M beams, D width, E entities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.data.batch import IGNORE
from sansgpu.data.forms.graphs import Entity, Triple
from sansgpu.machine.probe import mixed_precision
from sansgpu.tasks.graph.batch import GraphBatch, MaskedExample
from sansgpu.tasks.graph.entities import NameBags
from sansgpu.tasks.graph.leafy import LeafyExample, PlacedTriple
from sansgpu.tasks.graph.tokenizer import GraphCodec, MaskTokenizer

if TYPE_CHECKING:  # it imports this module
    from sansgpu.tasks.graph.objective import GraphObjective


MAX_NODES = 8192  # maximum nodes per forward pass
MAX_VALUES = 1 << 24  # maximum fp32 values in memory for the outputs of one forward pass: 64 MiB
_NO_TRIPLE = Triple("", "", "")  # placeholder, because a question has no tail
NONE = float("-inf")  # score of an impossible answer


class PredictedTail(NamedTuple):
    """A predicted tail."""

    text: str
    score: float  # mean log-probability of its tokens


class TailQuery(NamedTuple):
    """A (head, relation, ?) question about a head in its window."""

    tokens: np.ndarray  # (R,) int64, of the window, including its first and last special token
    root: int  # the head's first root
    head_length: int  # tokens of the head's name
    relation: int  # 1, 2, ...
    entity: int = 0  # the head's row in the entity table, or 0


@dataclass(frozen=True)
class TailPredictor:
    """A trained encoder in evaluation mode on `device`, with matmuls in `precision`."""

    objective: GraphObjective
    mask_id: int
    device: torch.device
    precision: str = "fp32"

    @property
    def vocabulary(self) -> int:
        """Returns V."""
        return self.objective.model.embedding.num_embeddings

    def pieces(self, questions: Sequence[TailQuery], leaves: int, numbers: int) -> Iterator[tuple[int, int]]:
        """Yields the range [start, stop) of questions for each pass, if a question needs `numbers` fp32 values."""
        start = nodes = 0
        for stop, question in enumerate(questions):
            size = len(question.tokens) + leaves
            if stop > start and (nodes + size > MAX_NODES or (stop + 1 - start) * numbers > MAX_VALUES):
                yield start, stop
                start, nodes = stop, 0
            nodes += size
        if questions:
            yield start, len(questions)

    @torch.no_grad()
    def log_probabilities(
        self, questions: Sequence[TailQuery], leaves: np.ndarray, slots: slice = slice(None)
    ) -> torch.Tensor:
        """Returns the log-probabilities of all tokens on the given slots from one forward pass, (Q, slots, V) fp32.

        `leaves` (Q, L) are known tokens or masks. The output projection is always in fp32, because bf16 cannot
        distinguish the logits of close candidates.
        """
        states = self._leaf_states(questions, leaves)[:, slots]
        model = self.objective.model
        with self.head_precision():
            predicted = model.predicted(states.flatten(0, 1))
        logits = F.linear(predicted.float(), model.embedding.weight.float())
        return torch.log_softmax(logits, dim=-1).view(len(questions), -1, self.vocabulary)

    @torch.no_grad()
    def entity_log_probabilities(
        self, questions: Sequence[TailQuery], candidates: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Returns the log-probability of each candidate from one forward pass, (Q, S) fp32.

        `candidates` (S, D) and `table` (E, D) are fp32; the table has the vectors of entities 1, 2, ..., for the heads.
        """
        states = self._leaf_states(questions, self.empty(questions, 1))[:, 0]
        heads, relations = torch.tensor([(q.entity, q.relation) for q in questions], device=self.device).unbind(1)
        with self.head_precision():
            predicted = self.objective.predicted_entities(states, heads, relations, table)
        return torch.log_softmax(predicted.float() @ candidates.T, dim=-1)

    @torch.no_grad()
    def candidate_vectors(self, names: Sequence[Sequence[int]], numbers: Sequence[int]) -> torch.Tensor:
        """Returns the vectors of entities, (S, D) fp32, from the token ids of their names and their table rows."""
        model = self.objective.model
        assert model.entities is not None
        bags = NameBags(names, self.vocabulary, self.device)
        chosen = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with self.head_precision():
            own = model.entities.own_vectors(chosen)
        return own.float() + bags.means(model.embedding.weight)

    def head_precision(self) -> torch.autocast:
        """Returns an autocast context for the output head: fp32, unless the model is in training with bf16 weights."""
        narrow = self.objective.model.transform.weight.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=narrow)

    def _leaf_states(self, questions: Sequence[TailQuery], leaves: np.ndarray) -> torch.Tensor:
        """Returns the hidden states of the leaves, (Q, L, D) fp32."""
        graphs = [_leafy(question, row) for question, row in zip(questions, leaves, strict=True)]
        batch = GraphBatch.of(graphs, [_without_targets(graph) for graph in graphs]).to(self.device)
        with mixed_precision(self.device, self.precision):
            states = self.objective.states(batch)
        return states[batch.is_leaf].float().view(*leaves.shape, -1)

    def empty(self, questions: Sequence[TailQuery], leaves: int) -> np.ndarray:
        """Returns `leaves` masked leaves for each question, (Q, L)."""
        return np.full((len(questions), leaves), self.mask_id, np.int64)


def _leafy(question: TailQuery, leaves: np.ndarray) -> LeafyExample:
    placed = PlacedTriple(
        question.root, question.head_length, question.relation, leaves, _NO_TRIPLE, (question.entity, 0)
    )
    return LeafyExample(question.tokens, np.zeros(len(question.tokens), bool), [placed])


def _without_targets(graph: LeafyExample) -> MaskedExample:
    tokens = np.concatenate([graph.tokens, *(placed.tail for placed in graph.placed)])
    return MaskedExample(tokens, np.full(len(tokens), IGNORE), np.zeros((len(tokens), 2), np.int64))


class BeamSearch:
    """Beam search for tails of 1, 2, ... tokens, which are predicted from left to right.

    A tail never has the same token twice in a row. Masked leaves of one head look alike to the model, so it would often
    predict the same token on each of them.
    """

    def __init__(self, predictor: TailPredictor, tokenizer: MaskTokenizer, leaves: int, width: int, count: int) -> None:
        """Searches for the `count` best tails of up to `leaves` tokens, with `width` beams for each length."""
        self._predictor, self._tokenizer, self._leaves = predictor, tokenizer, leaves
        self._width, self._count = min(width, predictor.vocabulary), count
        self._allowed = torch.full((predictor.vocabulary,), NONE, device=predictor.device)
        self._allowed[torch.from_numpy(tokenizer.ordinary_ids()).to(predictor.device)] = 0.0

    def predict_tails(self, questions: Sequence[TailQuery], floors: np.ndarray) -> list[list[PredictedTail]]:
        """Returns the best tails of each question with scores above its floor (Q,), best first."""
        best: list[dict[str, float]] = [{} for _ in questions]
        bounds = floors.astype(np.float64)
        for length in range(1, self._leaves + 1):
            for question, ids, score in zip(*self._beams(questions, length, bounds), strict=True):
                if text := self._tokenizer.decode(ids).strip():
                    best[question][text] = max(score, best[question].get(text, NONE))
            for number, found in enumerate(best):
                best[number] = dict(sorted(found.items(), key=lambda item: -item[1])[: self._count])
                if len(best[number]) == self._count:
                    bounds[number] = max(bounds[number], min(best[number].values()))
        return [[PredictedTail(text, score) for text, score in found.items()] for found in best]

    def _beams(
        self, questions: Sequence[TailQuery], length: int, bounds: np.ndarray
    ) -> tuple[list[int], list[list[int]], list[float]]:
        """Returns the beams of `length` tokens: question index, token ids and score of each.

        A beam is dropped when its score could not exceed its question's bound even if all remaining tokens were
        certain, which does not change the result.
        """
        rows, totals = np.arange(len(questions)), np.zeros(len(questions))
        ids = self._predictor.empty(questions, length)
        for slot in range(length):
            values, tokens = self._top_tokens([questions[row] for row in rows.tolist()], ids, slot)
            sums, parents = (totals[:, None] + values).ravel(), np.repeat(np.arange(len(rows)), self._width)
            order = np.lexsort((-sums, rows[parents]))  # sorts by question, best first
            question = rows[parents[order]]
            rank = np.arange(len(order)) - np.searchsorted(question, question)
            selected = order[(rank < self._width) & (sums[order] / length > bounds[question])]
            ids, rows, totals = ids[parents[selected]], rows[parents[selected]], sums[selected]
            ids[:, slot] = tokens.ravel()[selected]
        return rows.tolist(), ids.tolist(), (totals / length).tolist()

    def _top_tokens(self, questions: Sequence[TailQuery], ids: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log-probabilities and ids of the best tokens of one leaf, each (M, width)."""
        values, tokens = np.zeros((len(questions), self._width)), np.zeros((len(questions), self._width), np.int64)
        for start, stop in self._predictor.pieces(questions, ids.shape[1], 2 * self._predictor.vocabulary):
            log_probs = self._predictor.log_probabilities(questions[start:stop], ids[start:stop], slice(slot, slot + 1))
            log_probs = log_probs[:, 0] + self._allowed
            if slot:
                log_probs.scatter_(1, torch.from_numpy(ids[start:stop, slot - 1 : slot]).to(log_probs.device), NONE)
            found = log_probs.topk(self._width)
            values[start:stop], tokens[start:stop] = found.values.cpu().numpy(), found.indices.cpu().numpy()
        return values, tokens


def normal(text: str) -> str:
    """Normalizes a name for comparison: folds case and collapses spaces."""
    return " ".join(text.split()).casefold()


class Candidates(ABC):
    """Base of candidate tails. Names that the model cannot distinguish share a column of scores.

    `column` is the column of each name, or -1 if it cannot be scored; `columns` is the number of columns.
    """

    def __init__(self, names: Sequence[str], keys: Sequence[Hashable | None], columns: Sequence[Hashable]) -> None:
        numbers = {key: number for number, key in enumerate(columns)}
        self.names, self._same = tuple(names), defaultdict[str, list[int]](list)
        for number, name in enumerate(names):
            self._same[normal(name)].append(number)
        self.column = np.array([-1 if key is None else numbers[key] for key in keys], np.int64)
        self.columns = len(columns)
        self._first = np.full(len(columns), len(names))  # index of each column's first name
        np.minimum.at(self._first, self.column[self.column >= 0], np.flatnonzero(self.column >= 0))

    @abstractmethod
    def pieces(self, predictor: TailPredictor, questions: Sequence[TailQuery]) -> Iterator[tuple[int, int]]:
        """Yields ranges [start, stop) of questions for which a call of `scores` fits into memory."""

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
        for rows in self._by_length:  # one forward pass per number of tokens
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
    """Builds candidates from names, scored by the model's entity table if it has one, or else by their tokens."""
    if table:
        return EntityCandidates(predictor, codec.tokenizer, table, table.named(names))
    return SpelledCandidates(codec.tokenizer, names, leaves)

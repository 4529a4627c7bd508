"""What stands on the masked leaves of a head: names that are given, or what a search spells with likely tokens.

Q questions, L leaves of each, V vocabulary, S spellings of names, M beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sansgpu.data.batch import IGNORE
from sansgpu.data.graph import Triple
from sansgpu.data.graph_batch import GraphBatch
from sansgpu.data.leafy import Leafy, Placed
from sansgpu.data.mask_tokenizer import MaskTokenizer
from sansgpu.data.masking import Masked
from sansgpu.models.entities import NameBags
from sansgpu.tasks.graph import GraphObjective

NODES = 8192  # of a forward pass
NUMBERS = 1 << 24  # fp32 numbers that are kept of the questions asked at once: 64 MiB
_NOBODY = Triple("", "", "")  # what is asked has no tail yet
NONE = float("-inf")  # the score of what cannot be


class Tail(NamedTuple):
    """What may stand on the leaves."""

    text: str
    score: float  # mean log-probability of its tokens


class Question(NamedTuple):
    """A head in its window, and a relation: what is the tail?"""

    tokens: np.ndarray  # (R,) int64, of the window, with those that begin and end it
    place: int  # the head's first root
    head_length: int  # in tokens
    relation: int  # 1, 2, ...
    entity: int = 0  # the head's number in the entity table


@dataclass(frozen=True)
class GapFiller:
    """A trained encoder, in evaluation mode and on `device`, whose products are computed in `precision`."""

    objective: GraphObjective
    mask_id: int
    device: torch.device
    precision: str = "fp32"

    @property
    def vocabulary(self) -> int:
        """Tokens that each leaf has a probability for: V."""
        return self.objective.model.embedding.num_embeddings

    def pieces(self, questions: Sequence[Question], leaves: int, numbers: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of the questions to ask at once, where `numbers` of fp32 are kept of each."""
        start = nodes = 0
        for stop, question in enumerate(questions):
            size = len(question.tokens) + leaves
            if stop > start and (nodes + size > NODES or (stop + 1 - start) * numbers > NUMBERS):
                yield start, stop
                start, nodes = stop, 0
            nodes += size
        if questions:
            yield start, len(questions)

    @torch.no_grad()
    def log_probabilities(
        self, questions: Sequence[Question], leaves: np.ndarray, slots: slice = slice(None)
    ) -> torch.Tensor:
        """Of every token on these slots of the leaves, by one forward pass; (Q, slots, V) fp32.

        leaves (Q, L): the tokens that are known, and the mask elsewhere. The last product is always in fp32, as bf16
        cannot tell logits of near candidates apart.
        """
        states = self._leaf_states(questions, leaves)[:, slots]
        logits = self.objective.model.logits(states.flatten(0, 1)).float()
        return torch.log_softmax(logits, dim=-1).view(len(questions), -1, self.vocabulary)

    @torch.no_grad()
    def entity_log_probabilities(
        self, questions: Sequence[Question], candidates: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Of each candidate to be the tail, by one forward pass; returns (Q, S) fp32.

        candidates (S, D) fp32; table (E, D) fp32, the vectors of the entities 1, 2, ... that heads may be.
        """
        states = self._leaf_states(questions, self.empty(questions, 1))[:, 0]
        heads, relations = torch.tensor([(q.entity, q.relation) for q in questions], device=self.device).unbind(1)
        predicted = self.objective.predicted_entities(states, heads, relations, table)
        return torch.log_softmax(predicted @ candidates.T, dim=-1)

    @torch.no_grad()
    def candidate_vectors(self, names: Sequence[Sequence[int]], numbers: Sequence[int]) -> torch.Tensor:
        """Vectors of entities with these tokens in their names and these numbers in the table, (S, D) fp32."""
        model = self.objective.model
        assert model.entities is not None
        bags = NameBags(names, self.vocabulary, self.device)
        chosen = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        return model.entities.own_vectors(chosen).float() + bags.means(model.embedding.weight)

    def _leaf_states(self, questions: Sequence[Question], leaves: np.ndarray) -> torch.Tensor:
        """Of every leaf, (Q, L, D) fp32."""
        graphs = [_leafy(question, row) for question, row in zip(questions, leaves, strict=True)]
        batch = GraphBatch.of(graphs, [_shown(graph) for graph in graphs]).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            states = self.objective.states(batch)
        return states[batch.is_leaf].float().view(*leaves.shape, -1)

    def empty(self, questions: Sequence[Question], leaves: int) -> np.ndarray:
        """So many masked leaves for each question, (Q, L)."""
        return np.full((len(questions), leaves), self.mask_id, np.int64)


def _leafy(question: Question, leaves: np.ndarray) -> Leafy:
    placed = Placed(question.place, question.head_length, question.relation, leaves, _NOBODY, (question.entity, 0))
    return Leafy(question.tokens, np.zeros(len(question.tokens), bool), [placed])


def _shown(graph: Leafy) -> Masked:
    tokens = np.concatenate([graph.tokens, *(placed.tail for placed in graph.placed)])
    return Masked(tokens, np.full(len(tokens), IGNORE), np.zeros((len(tokens), 2), np.int64))


class BeamSearch:
    """Tails of 1, 2, ... tokens, spelled from the first leaf on: each next token is asked for with those before in
    their places. No token is spelled twice in a row: to the model masked leaves of one head look much alike, and left
    alone it says its best token on each of them.
    """

    def __init__(self, filler: GapFiller, tokenizer: MaskTokenizer, leaves: int, width: int, count: int) -> None:
        """The `count` best of tails with up to `leaves` tokens, from `width` beams for each number of tokens."""
        self._filler, self._tokenizer, self._leaves = filler, tokenizer, leaves
        self._width, self._count = min(width, filler.vocabulary), count
        self._allowed = torch.full((filler.vocabulary,), NONE, device=filler.device)
        self._allowed[torch.from_numpy(tokenizer.ordinary_ids()).to(filler.device)] = 0.0

    def tails(self, questions: Sequence[Question], floors: np.ndarray) -> list[list[Tail]]:
        """The best tails of each question, best first; only those whose score is above its floor (Q,)."""
        best: list[dict[str, float]] = [{} for _ in questions]
        bounds = floors.astype(np.float64)
        for length in range(1, self._leaves + 1):
            for question, ids, score in zip(*self._spelled(questions, length, bounds), strict=True):
                if text := self._tokenizer.decode(ids).strip():
                    best[question][text] = max(score, best[question].get(text, NONE))
            for number, found in enumerate(best):
                best[number] = dict(sorted(found.items(), key=lambda item: -item[1])[: self._count])
                if len(best[number]) == self._count:
                    bounds[number] = max(bounds[number], min(best[number].values()))
        return [[Tail(text, score) for text, score in found.items()] for found in best]

    def _spelled(
        self, questions: Sequence[Question], length: int, bounds: np.ndarray
    ) -> tuple[list[int], list[list[int]], list[float]]:
        """Beams of so many tokens: of which question, their ids and scores.

        A beam whose score would not be above its question's bound even if all tokens to come were certain is given up,
        which takes nothing from the result.
        """
        rows, totals = np.arange(len(questions)), np.zeros(len(questions))
        shown = self._filler.empty(questions, length)
        for slot in range(length):
            values, tokens = self._likeliest([questions[row] for row in rows.tolist()], shown, slot)
            sums, parents = (totals[:, None] + values).ravel(), np.repeat(np.arange(len(rows)), self._width)
            order = np.lexsort((-sums, rows[parents]))  # question by question, the best first
            asked = rows[parents[order]]
            place = np.arange(len(order)) - np.searchsorted(asked, asked)
            kept = order[(place < self._width) & (sums[order] / length > bounds[asked])]
            shown, rows, totals = shown[parents[kept]], rows[parents[kept]], sums[kept]
            shown[:, slot] = tokens.ravel()[kept]
        return rows.tolist(), shown.tolist(), (totals / length).tolist()

    def _likeliest(self, questions: Sequence[Question], shown: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and ids of the best tokens of one leaf, each (M, width)."""
        values, tokens = np.zeros((len(questions), self._width)), np.zeros((len(questions), self._width), np.int64)
        for start, stop in self._filler.pieces(questions, shown.shape[1], 2 * self._filler.vocabulary):
            said = self._filler.log_probabilities(questions[start:stop], shown[start:stop], slice(slot, slot + 1))
            said = said[:, 0] + self._allowed
            if slot:
                said.scatter_(1, torch.from_numpy(shown[start:stop, slot - 1 : slot]).to(said.device), NONE)
            found = said.topk(self._width)
            values[start:stop], tokens[start:stop] = found.values.cpu().numpy(), found.indices.cpu().numpy()
        return values, tokens

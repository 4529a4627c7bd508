"""Evaluates link prediction: given a head and a relation, ranks every entity as the tail.

Ranks are filtered, which means that other true tails are ignored (Bordes et al. 2013). Entities with equal scores get
the mean of their best and worst possible rank (arXiv 1911.03903). N entities, Q queries, S columns of scores.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sansgpu.config import ConfigError, same_input
from sansgpu.config.schema import Config
from sansgpu.data.forms.graphs import INVERSE, GraphDocument, Triple
from sansgpu.data.order import generator
from sansgpu.events.progress import ReportProgress
from sansgpu.tasks.graph.data import HeldOutTriples, leafy_rules, read_graphs, split_by_group, without_facts
from sansgpu.tasks.graph.leafy import LeafyRules, build_leafy
from sansgpu.tasks.graph.settings import GraphDataConfig, GraphModelConfig
from sansgpu.tasks.graph.sources import GraphSource, open_graphs
from sansgpu.tasks.graph.tail_prediction import (
    Candidates,
    EntityCandidates,
    EntityTableIndex,
    SpelledCandidates,
    TailPredictor,
    TailQuery,
)
from sansgpu.tasks.graph.tokenizer import GraphCodec
from sansgpu.tasks.graph.triples import KnownFacts, triples_of
from sansgpu.tasks.task import TrainedModel

if TYPE_CHECKING:  # it imports this module
    from sansgpu.tasks.graph.objective import GraphObjective

Documents = list[GraphDocument]

HITS = (1, 3, 10)
# Held-out triples per side (heads, tails) to rank at each evaluation during training: with and without an entity table.
# Without one, a triple needs a forward pass for every number of tokens that a tail may have.
SAMPLED_TRIPLES, SAMPLED_SPELLED = 128, 32
SHOWN = ("mrr", "hits_at_1", "queries", "relation_frequency_mrr")  # metrics per side during training
ANY_LENGTH = 1 << 30  # maximum tokens of a tail, if there is no limit
EULER = 0.5772  # the harmonic number of N is about ln N + EULER


class LinkQuery(NamedTuple):
    """A triple whose tail is to be predicted."""

    triple: Triple
    question: TailQuery | None  # None if the head is in no window, the tail is too long or the relation is unknown


class LinkPrediction:
    """Ranks entities with a trained encoder."""

    def __init__(
        self,
        predictor: TailPredictor,
        codec: GraphCodec,
        rules: LeafyRules,
        known: KnownFacts,
    ) -> None:
        self._predictor, self._codec, self._known = predictor, codec, known
        self._rules = replace(rules, triples="all")  # includes triples that training would have dropped
        self._candidates: Candidates
        if codec.entities:  # with entity vectors, tails can have any length
            self._rules = replace(self._rules, leaves=ANY_LENGTH)
            index = EntityTableIndex(codec.entities)
            self._candidates = EntityCandidates(predictor, codec.tokenizer, index, known.entities)
        else:
            names = [entity.name for entity in known.entities]
            self._candidates = SpelledCandidates(codec.tokenizer, names, rules.leaves)
        scored = self._candidates.column[self._candidates.column >= 0]
        self._sharing = torch.from_numpy(np.bincount(scored, minlength=self._candidates.columns)).int()

    def report(
        self, documents: Iterable[GraphDocument], inverse: bool, limit: int | None, progress: ReportProgress
    ) -> dict[str, Any]:
        """Returns the metrics of the documents' triples: `tail` and, with `inverse` relations, `head`.

        All triples must be known facts. With `limit`, uses a fixed random subset of that many triples per side.
        """
        return self.rank(self.queries(documents, inverse, limit), progress)

    def queries(
        self, documents: Iterable[GraphDocument], inverse: bool, limit: int | None
    ) -> dict[str, list[LinkQuery]]:
        """Returns the queries by side (`tail`, `head`), which do not depend on the model's weights."""
        sides: dict[str, list[tuple[GraphDocument, Triple]]] = {"tail": [], "head": []}
        for document in documents:
            for triple in document.triples:
                side = "head" if inverse and triple.relation.startswith(INVERSE) else "tail"
                sides[side].append((document, triple))
        return {side: self._queries(_subset(triples, limit)) for side, triples in sides.items() if triples}

    def rank(self, chosen: dict[str, list[LinkQuery]], progress: ReportProgress) -> dict[str, Any]:
        """Returns the metrics of the queries of each side."""
        ranks = iter(self._ranks([query for queries in chosen.values() for query in queries], progress))
        return {side: self._metrics(queries, [next(ranks) for _ in queries]) for side, queries in chosen.items()}

    def _queries(self, documents: list[GraphDocument]) -> list[LinkQuery]:
        """Returns a query for every triple, in order."""
        codec = self._codec
        graphs = build_leafy(documents, codec.tokenizer, codec.relations, self._rules, entities=codec.entities)
        questions: dict[Triple, deque[TailQuery]] = defaultdict(deque)
        for window, placed in graphs.examples:
            tokens = graphs.windows[window][0].astype(np.int64)
            for p in placed:
                questions[p.triple].append(TailQuery(tokens, p.root, p.head_length, p.relation, p.entities[0]))
        triples = triples_of(documents)
        return [LinkQuery(triple, questions[triple].popleft() if questions[triple] else None) for triple in triples]

    def _ranks(self, queries: list[LinkQuery], progress: ReportProgress) -> np.ndarray:
        """Returns the filtered rank of each query's tail, (Q,); the middle rank if the query has no question."""
        ranks = np.full(len(queries), (len(self._known.entities) + 1) / 2)
        numbers = [number for number, query in enumerate(queries) if query.question is not None]
        questions = [query.question for query in queries if query.question is not None]
        for start, stop in self._candidates.pieces(self._predictor, questions):
            scores = self._candidates.scores(self._predictor, questions[start:stop])
            part = numbers[start:stop]
            ranks[part] = self._ranked(scores, [queries[number].triple for number in part])
            progress("ranking entities", stop, len(questions), "query")
        return ranks

    def _ranked(self, scores: torch.Tensor, triples: list[Triple]) -> np.ndarray:
        """Computes filtered ranks from scores (Q, S). A column counts once for each entity that shares it."""
        column = self._candidates.column
        gold = scores.gather(1, torch.from_numpy(column[[self._known.tail(t) for t in triples]])[:, None])
        zero = torch.zeros((), dtype=torch.int32)
        better, equal = (
            torch.where(test, self._sharing, zero).sum(dim=1).numpy() for test in (scores > gold, scores == gold)
        )
        others = [column[self._known.others(triple)] for triple in triples]
        rows = np.repeat(np.arange(len(triples)), [len(numbers) for numbers in others])
        columns = np.concatenate(others).astype(np.int64)
        rows, columns = rows[columns >= 0], columns[columns >= 0]
        known, limits = scores[rows, columns].numpy(), gold.numpy()[rows, 0]
        better = better - np.bincount(rows[known > limits], minlength=len(triples))
        equal = equal - np.bincount(rows[known == limits], minlength=len(triples)) - 1  # without the tail itself
        ranks: np.ndarray = 1 + better + equal / 2
        return ranks

    def _metrics(self, queries: list[LinkQuery], ranks: list[float]) -> dict[str, Any]:
        entities, baseline = len(self._known.entities), self._frequency_ranks(queries)
        names = sorted({query.triple.relation for query in queries})
        by_relation = {name: [n for n, query in enumerate(queries) if query.triple.relation == name] for name in names}
        return {
            **_means(ranks, HITS),
            "queries": len(queries),
            "covered": sum(query.question is not None for query in queries) / len(queries),
            "trained_on": sum(query.triple.fact in self._known.trained for query in queries) / len(queries),
            "candidates": entities,
            "random_mrr": (math.log(entities) + EULER) / entities,
            **_frequency_mrr(baseline),
            "relations": {
                name: {
                    **_means([ranks[n] for n in numbers], (10,)),
                    "queries": len(numbers),
                    **_frequency_mrr([baseline[n] for n in numbers] if baseline else []),
                }
                for name, numbers in by_relation.items()
            },
        }

    def _frequency_ranks(self, queries: list[LinkQuery]) -> list[float]:
        """Computes the ranks of a baseline: how often an entity is the relation's tail in training.

        Empty if there are no training facts.
        """
        return [self._frequency_rank(query.triple) for query in queries] if self._known.trained else []

    def _frequency_rank(self, triple: Triple) -> float:
        counts, ordered = self._known.frequencies(triple.relation)
        gold, others = counts[self._known.tail(triple)], counts[self._known.others(triple)]
        first, last = (int(np.searchsorted(ordered, gold, side)) for side in ("left", "right"))
        better = len(ordered) - last - int((others > gold).sum())
        equal = last - first - 1 - int((others == gold).sum())
        return 1 + better + equal / 2


def _subset(triples: list[tuple[GraphDocument, Triple]], limit: int | None) -> Documents:
    """Returns the documents with a random subset of their triples, in order."""
    if limit is not None and limit < len(triples):
        numbers = np.sort(generator(0, "link prediction").permutation(len(triples))[:limit])
        triples = [triples[number] for number in numbers]
    groups = (list(group) for _, group in groupby(triples, key=lambda pair: id(pair[0])))
    return [group[0][0]._replace(triples=tuple(triple for _, triple in group)) for group in groups]


def _means(ranks: Sequence[float], hits: Sequence[int]) -> dict[str, float]:
    found = np.array(ranks, np.float64)
    return {"mrr": float((1 / found).mean()), **{f"hits_at_{k}": float((found <= k).mean()) for k in hits}}


def _frequency_mrr(ranks: Sequence[float]) -> dict[str, float]:
    return {"relation_frequency_mrr": _means(ranks, ())["mrr"]} if ranks else {}


class SampledRanking:
    """Ranks a fixed sample of held-out triples repeatedly during training."""

    def __init__(self, objective: GraphObjective, codec: GraphCodec, held: HeldOutTriples) -> None:
        self._objective, self._codec, self._held = objective, codec, held
        self._chosen: dict[str, list[LinkQuery]] | None = None

    def metrics(self, device: torch.device, precision: str, progress: ReportProgress) -> dict[str, float]:
        """Returns the metrics of tails and, with the prefix `head_`, of heads."""
        config = self._objective.config
        predictor = TailPredictor(self._objective, self._codec.tokenizer.mask_id, device, precision)
        ranking = LinkPrediction(predictor, self._codec, leafy_rules(config), self._held.known)
        if self._chosen is None:
            limit = SAMPLED_TRIPLES if self._codec.entities else SAMPLED_SPELLED
            self._chosen = ranking.queries(self._held.documents, GraphDataConfig.of(config).inverse_relations, limit)
        report = ranking.rank(self._chosen, progress)
        found = {
            ("" if side == "tail" else "head_") + name: report[side].get(name) for side in report for name in SHOWN
        }
        return {name: float(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class GraphParts:
    """Documents of a source by split."""

    train: Documents
    validation: Documents
    test: Documents


def rank_tails(
    loaded: TrainedModel, data: str | None, limit: int | None, progress: ReportProgress, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Ranks entities as the tails of the triples of `data`, or of the run's own held-out triples."""
    require_triples(loaded)
    config, target = loaded.config, loaded.source.target
    own = run_parts(loaded, progress, warn)
    if data is not None:
        parts = own if own and same_input(data, config.data.dataset_name) else open_all(config, data, progress, warn)
        queried = parts.test or parts.validation or parts.train
    elif own is not None:
        parts, queried = own, _unseen(own)
    else:
        raise ConfigError(f"{target} is not a run, so it has no triples; pass a dataset with --data.")
    if not any(document.triples for document in queried):
        raise ConfigError(f"{data or config.data.dataset_name} has no triples to rank; pass a different --data.")
    trained = own.train if own else parts.train if queried is not parts.train else []
    known = KnownFacts(trained, [d for p in (own, parts) if p for d in (*p.train, *p.validation, *p.test)])
    ranking = LinkPrediction(tail_predictor(loaded), loaded.tokenizer, leafy_rules(config), known)
    return ranking.report(queried, GraphDataConfig.of(config).inverse_relations, limit, progress)


def require_triples(loaded: TrainedModel) -> None:
    """Raises ConfigError if a graph encoder was trained without triples."""
    if not GraphModelConfig.of(loaded.config).leaf_slots or not loaded.tokenizer.relations:
        target = loaded.source.target
        raise ConfigError(f"{target} was trained without triples, so it has no relations; pass a run with triples.")


def tail_predictor(loaded: TrainedModel) -> TailPredictor:
    return TailPredictor(loaded.objective, loaded.tokenizer.tokenizer.mask_id, loaded.device, loaded.precision)


def run_parts(loaded: TrainedModel, progress: ReportProgress, warn: Callable[[str], None]) -> GraphParts | None:
    """Returns a run's own data, or None for an exported folder."""
    if loaded.source.snapshot is None:
        return None
    return open_all(loaded.config, loaded.config.data.dataset_name, progress, warn)


def open_all(config: Config, name: str, progress: ReportProgress, warn: Callable[[str], None]) -> GraphParts:
    """Returns the splits of a source. Splits off validation data as in training if the run's own data has none."""
    own = same_input(name, config.data.dataset_name)
    data = GraphDataConfig.of(config).model_copy(
        update={} if own else {"dataset_name": name, "dataset_config": None, "validation_name": None}
    )
    sources = open_graphs(data, warn, data.inverse_relations)

    def read(source: GraphSource | None) -> Documents:
        return read_graphs(source, config, progress) if source else []

    train, validation, test = read(sources.train), read(sources.validation), read(sources.test)
    if own and sources.validation is None:
        train, validation = split_by_group(train, data.validation_split)
    return GraphParts(train, validation, test)


def _unseen(parts: GraphParts) -> Documents:
    """Returns the test or validation documents without triples that also occur in training."""
    known = frozenset(triple.fact for document in parts.train for triple in document.triples)
    return without_facts(parts.test or parts.validation, known)

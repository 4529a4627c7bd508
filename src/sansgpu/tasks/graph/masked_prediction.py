"""Masked language modeling: masked batches for training, and the evaluation on held-out examples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.config import derive_seed
from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE
from sansgpu.data.order import batch_indices, generator, steps_per_epoch
from sansgpu.events.progress import ReportProgress
from sansgpu.tasks.evaluation import wilson
from sansgpu.tasks.graph.batch import TAIL_LENGTH, TAIL_START, GraphBatch, MaskRules, add_entity_queries, mask_example
from sansgpu.tasks.graph.leafy import LeafyDataset
from sansgpu.tasks.graph.settings import GraphDataConfig, GraphModelConfig, GraphTrainingConfig, max_span
from sansgpu.tasks.graph.tokenizer import MaskTokenizer
from sansgpu.tasks.task import StepSums, Sums

NODE_TARGETS = ("mlm", "mnm")  # masked tokens of the text, masked leaves
ENTITY = "entity"  # entity queries: predict the tail among all entities
KGE = "kge"  # facts: predict the tail among all entities from only the head's vector and the relation
SBO = "sbo"  # span boundary objective: predict masked tokens from the tokens around their span
Ordered = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (indices of a batch, all lengths) -> reordered indices


class MaskedModel(Protocol):
    """A model that predicts masked nodes."""

    @property
    def model(self) -> nn.Module: ...

    def masked_logits(self, batch: GraphBatch) -> torch.Tensor:
        """Returns the logits (M, V) of the nodes with a target, in order."""

    def query_sums(self, batch: GraphBatch) -> Sums:
        """Returns loss, hits and count of the batch's entity queries; {} if there are none."""


class Ranking(Protocol):
    """A fixed sample of held-out triples to rank."""

    def metrics(self, device: torch.device, precision: str, progress: ReportProgress) -> dict[str, float]: ...


def mask_rules(config: Config, tokenizer: MaskTokenizer) -> MaskRules:
    """Returns the masking settings of a configuration."""
    data = GraphDataConfig.of(config)
    return MaskRules(
        data.mask_ratio,
        max_span(config),
        data.leaf_mask_ratio,
        data.min_leaf_groups,
        tokenizer.mask_id,
        tokenizer.ordinary_ids(),
        data.entity_query_ratio if GraphModelConfig.of(config).n_entities else 0.0,
    )


def _keep_order(numbers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return numbers


@dataclass(frozen=True)
class Facts:
    """Triples of entities, K of which are sampled for each example."""

    triples: np.ndarray  # (F, 3) int64: ids of head, relation and tail
    each: int  # K

    @classmethod
    def of(cls, graphs: LeafyDataset, each: int) -> Facts | None:
        """Collects the distinct triples whose head and tail are in the entity table; None without any, or if K is 0."""
        placed = (p for _, placed in graphs.examples for p in placed)
        found = dict.fromkeys((p.entities[0], p.relation, p.entities[1]) for p in placed if all(p.entities))
        return cls(np.array(list(found), np.int64), each) if found and each else None

    def drawn(self, seed: int, epoch: int, numbers: np.ndarray) -> np.ndarray:
        """Samples K facts for each of the examples `numbers`, (B, K, 3)."""
        draws = (generator(seed, "facts", epoch, int(number)) for number in numbers)
        rows = np.array([draw.integers(len(self.triples), size=self.each) for draw in draws])
        drawn: np.ndarray = self.triples[rows]
        return drawn


@dataclass(frozen=True)
class Masking:
    """Examples with new masks in each epoch."""

    graphs: LeafyDataset
    rules: MaskRules
    seed: int
    ordered: Ordered = _keep_order
    facts: Facts | None = None  # facts to learn without text

    def batch(self, numbers: np.ndarray, epoch: int) -> GraphBatch:
        """Returns a masked batch of the examples with the indices `numbers`."""
        numbers = self.ordered(numbers, self.graphs.lengths)
        examples = [
            add_entity_queries(self.graphs.example(int(number)), self.rules, self.seed, epoch, int(number))
            for number in numbers
        ]
        masked_examples = [
            mask_example(example, self.rules, self.seed, epoch, int(number))
            for example, number in zip(examples, numbers, strict=True)
        ]
        facts = self.facts.drawn(self.seed, epoch, numbers) if self.facts else None
        return GraphBatch.of(examples, masked_examples, facts)

    def of_step(self, step: int, size: int) -> GraphBatch:
        """Returns the batch of step 0, 1, 2, ..."""
        epoch = step // steps_per_epoch(len(self.graphs), size)
        return self.batch(batch_indices(self.seed, step, len(self.graphs), size), epoch)


def validation_masking(graphs: LeafyDataset, rules: MaskRules, seed: int, ordered: Ordered = _keep_order) -> Masking:
    """Masks held-out examples with a separate seed, in the same way at every evaluation."""
    return Masking(graphs, rules, derive_seed(seed, "validation"), ordered)


class MetricSums(StepSums):
    """Accumulates sums for training metrics of several kinds of targets."""

    def add_target(self, name: str, weight: float, loss: float, count: float, **values: float) -> None:
        """Adds values for one type of target: its summed loss, which has a weight, and the number of targets.

        `name` prefixes their keys.
        """
        values = {"loss": loss, "weighted": weight * loss, "count": count, **values}
        self.add({f"{name}_{key}": value for key, value in values.items()})


class MeanLosses:
    """Computes a training loss that is comparable between step events, whichever targets their steps happen to have.

    Each kind of target contributes its weighted mean loss over all targets since the last event. Without any target
    (e.g. if few leaves are masked) it contributes its last mean, or before the first one, that of a uniform prediction.
    """

    def __init__(self, config: Config) -> None:
        pooled = GraphTrainingConfig.of(config).mnm_reduction == "pooled"
        self._kinds = [*([NODE_TARGETS] if pooled else [(name,) for name in NODE_TARGETS]), (SBO,), (ENTITY,), (KGE,)]
        self._untrained = _untrained_losses(config)

    def total(self, sums: Sums) -> float:
        """Returns the sum of the weighted mean losses."""
        return sum(self._mean(kinds, sums) for kinds in self._kinds)

    def carried(self, sums: Sums) -> Sums:
        """Returns the last mean loss of each kind, which `total` needs if there are no targets until the next event."""
        return {_key(kinds): self._mean(kinds, sums) for kinds in self._kinds if self._untrained_loss(kinds)}

    def _mean(self, kinds: tuple[str, ...], sums: Sums) -> float:
        if count := sum(sums.get(f"{kind}_count", 0.0) for kind in kinds):
            return sum(sums.get(f"{kind}_weighted", 0.0) for kind in kinds) / count
        return sums.get(_key(kinds), self._untrained_loss(kinds))

    def _untrained_loss(self, kinds: tuple[str, ...]) -> float:
        return max(self._untrained[kind] for kind in kinds)


def _key(kinds: tuple[str, ...]) -> str:
    return f"{kinds[0]}_last_mean"


def _untrained_losses(config: Config) -> dict[str, float]:
    """Returns the weighted mean loss of a uniform prediction for each kind of target that the configuration has."""
    data, training, model = GraphDataConfig.of(config), GraphTrainingConfig.of(config), GraphModelConfig.of(config)
    token, entity = (math.log(max(1, number or 1)) for number in (model.vocab_size, model.n_entities))
    masks_leaves = config.leaf_slots and (data.leaf_mask_ratio or data.min_leaf_groups)
    return {
        "mlm": training.mlm_weight * token if data.mask_ratio else 0.0,
        # A ramp of the weight begins near 0.
        "mnm": training.mnm_weight * token if masks_leaves and not training.mnm_ramp_steps else 0.0,
        SBO: training.sbo_weight * token if data.mask_ratio else 0.0,
        ENTITY: training.entity_weight * entity if data.entity_query_ratio else 0.0,
        KGE: training.entity_weight * entity if data.kge_triples else 0.0,
    }


def masked_metrics(sums: Sums) -> dict[str, float]:
    """Computes loss, accuracy and counts for each kind of target that occurred."""
    metrics: dict[str, float] = {}
    for name in (*NODE_TARGETS, ENTITY):
        if count := sums.get(f"{name}_count"):
            metrics |= {
                f"{name}_loss": sums[f"{name}_loss"] / count,
                f"{name}_acc": sums[f"{name}_hits"] / count,
                f"{name}_hits": sums[f"{name}_hits"],
                f"{name}_count": count,
            }
    return metrics


@dataclass(frozen=True)
class Majority:
    """The most frequent tokens of texts and of tails in the training data."""

    root: int
    leaf: int


def majority_of(graphs: LeafyDataset) -> Majority:
    """Finds the most frequent tokens. Predicting them is the baseline for accuracy."""
    roots: Counter[int] = Counter()
    for tokens, _ in graphs.windows:
        roots.update(tokens[1:-1].tolist())
    leaves = Counter(token for _, placed in graphs.examples for p in placed for token in p.tail.tolist())
    first = [min(c, key=lambda token: (-c[token], token), default=-1) for c in (roots, leaves)]
    return Majority(*first)


class MaskedEvaluation:
    """Evaluates a model on masked held-out examples."""

    def __init__(
        self,
        masked_model: MaskedModel,
        masking: Masking,
        majority: Majority,
        weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
        ranking: Ranking | None = None,
    ) -> None:
        """`weights` are the weights of masked tokens, masked leaves and entity queries in `loss`."""
        self._model, self._masking, self._majority, self._weights = masked_model, masking, majority, weights
        self._ranking = ranking

    @property
    def model(self) -> nn.Module:
        return self._model.model

    def validation_batches(self, size: int) -> Iterator[GraphBatch]:
        """Yields all examples in order, `size` at a time, with the same masks in every evaluation."""
        count = len(self._masking.graphs)
        for start in range(0, count, size):
            yield self._masking.batch(np.arange(start, min(start + size, count)), epoch=0)

    def evaluate(self, batch: GraphBatch) -> Sums:
        """Returns losses, hits and counts of masked tokens and leaves, and the number of completely correct tails."""
        chosen = batch.targets != IGNORE
        targets, leaves = batch.targets[chosen], batch.is_leaf[chosen]
        sums = self._model.query_sums(batch)
        if not len(targets):
            return sums
        logits = self._model.masked_logits(batch).float()
        losses, correct = F.cross_entropy(logits, targets, reduction="none"), logits.argmax(dim=1) == targets
        for name, rows, majority in zip(
            NODE_TARGETS, (~leaves, leaves), (self._majority.root, self._majority.leaf), strict=True
        ):
            sums[f"{name}_loss"] = float(losses[rows].sum(dtype=torch.float64))
            sums[f"{name}_hits"] = float(correct[rows].sum())
            sums[f"{name}_usual"] = float((targets[rows] == majority).sum())
            sums[f"{name}_count"] = float(rows.sum())
        return sums | _complete_tails(batch, chosen, correct)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Computes mean losses and accuracies. `loss` is a weighted sum as in training, but never pooled."""
        metrics = masked_metrics(sums)
        weighted = zip((*NODE_TARGETS, ENTITY), self._weights, strict=True)
        losses = (weight * metrics.get(f"{name}_loss", 0.0) for name, weight in weighted)
        metrics = {"loss": sum(losses), **metrics}
        for name in NODE_TARGETS:
            if count := sums.get(f"{name}_count"):
                metrics[f"{name}_majority_acc"] = sums[f"{name}_usual"] / count
        if tails := sums.get("tails"):
            tail_hits = sums["whole_tails"]
            metrics |= {"tail_acc": tail_hits / tails, "tail_hits": tail_hits, "tail_count": tails}
        return metrics

    def rank_sample(self, device: torch.device, precision: str, progress: ReportProgress) -> dict[str, float]:
        return {} if self._ranking is None else self._ranking.metrics(device, precision, progress)

    def detailed(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Adds a 95% confidence interval to each accuracy (Wilson 1927)."""
        result: dict[str, Any] = dict(metrics)
        for name in (*NODE_TARGETS, ENTITY, "tail"):
            if count := metrics.get(f"{name}_count"):
                result[f"{name}_interval"] = wilson(metrics[f"{name}_acc"], count)
        return result


def _complete_tails(batch: GraphBatch, chosen: torch.Tensor, correct: torch.Tensor) -> Sums:
    """Counts masked tails, and those of which all tokens are correct."""
    hit = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
    hit[chosen] = correct.long()
    hits_before = torch.cat((hit.new_zeros(1), hit.cumsum(0)))
    tails = batch.placed_triples()
    tails = tails[chosen[tails[:, TAIL_START]]]
    first, leaves = tails[:, TAIL_START], tails[:, TAIL_LENGTH]
    all_correct = (hits_before[first + leaves] - hits_before[first]) == leaves
    return {"tails": float(len(tails)), "whole_tails": float(all_correct.sum())}

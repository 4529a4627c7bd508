"""The loss of graph encoders: masked tokens (MLM), masked tails of triples (MNM) and entities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sansgpu.config import derive_seed
from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE
from sansgpu.kernels.cross_entropy import LossOptions, linear_cross_entropy, linear_cross_entropy_and_hits
from sansgpu.kernels.embedding import embed
from sansgpu.models.modules import integer_of_model
from sansgpu.tasks.graph.batch import HEAD_ENTITY, QUERY_TAIL, RELATION, TAIL_START, GraphBatch
from sansgpu.tasks.graph.encoder import GraphEncoder
from sansgpu.tasks.graph.entities import NameBags
from sansgpu.tasks.graph.masked_prediction import (
    ENTITY,
    KGE,
    NODE_TARGETS,
    SBO,
    MeanLosses,
    MetricSums,
    masked_metrics,
)
from sansgpu.tasks.graph.settings import GraphModelConfig, GraphTrainingConfig, max_span
from sansgpu.tasks.task import Sums


class GraphObjective:
    """An encoder and its loss."""

    def __init__(
        self, config: Config, model: GraphEncoder | None = None, names: Sequence[Sequence[int]] | None = None
    ) -> None:
        """`names` are the token ids of the entities' names; if None (no data), each name is one arbitrary token."""
        self.config, self._sums = config, MetricSums()
        self.model = model or GraphEncoder(
            GraphModelConfig.of(config), derive_seed(config.training.seed, "model"), longest_span(config)
        )
        self.mean_losses = MeanLosses(config)
        self._names = names
        self._bags: NameBags | None = None

    @property
    def _loss_options(self) -> LossOptions:
        return LossOptions(integer=integer_of_model(self.model))

    def entity_vectors(self) -> torch.Tensor:
        """Returns the vectors of all entities, (E, D) fp32."""
        entities, embedding = self.model.entities, self.model.embedding.weight
        assert entities is not None
        if self._bags is None:
            count = len(entities.own.weight) - 1
            names = [[number % len(embedding)] for number in range(count)] if self._names is None else self._names
            self._bags = NameBags(names, len(embedding), embedding.device)
        vectors: torch.Tensor = entities(self._bags, embedding)
        return vectors

    def states(self, batch: GraphBatch) -> torch.Tensor:
        """Returns the hidden states of all nodes, (N, D)."""
        return self.model.hidden(batch.tokens, batch.nodes, batch.lengths, batch.placed_triples())

    def masked_logits(self, batch: GraphBatch) -> torch.Tensor:
        return self.model.logits(self.states(batch)[batch.targets != IGNORE])

    def loss(self, batch: GraphBatch) -> torch.Tensor:
        """Computes the sum of all losses with the batch's weights, ()."""
        states, chosen = self.states(batch), batch.targets != IGNORE
        targets, leaves = batch.targets[chosen], batch.is_leaf[chosen]
        predicted, total = self.model.predicted(states[chosen]), states.sum() * 0.0
        weights = zip(batch.weights[:2], batch.mean_weights[:2], strict=True)
        for name, rows, (weight, share) in zip(NODE_TARGETS, (~leaves, leaves), weights, strict=True):
            if bool(rows.any()):
                head = self.model.embedding.weight
                loss, hits = linear_cross_entropy_and_hits(predicted[rows], head, targets[rows], self._loss_options)
                total = total + weight * loss
                self._sums.add_target(name, share, float(loss.detach()), float(rows.sum()), hits=float(hits))
        if self.model.entities is not None:
            vectors = self.entity_vectors()
            total = total + batch.weights[3] * self._query_loss(batch, states, vectors, self._sums)
            if batch.fact_count:
                total = total + batch.weights[4] * self._fact_loss(batch, vectors, self._sums)
        if self.model.boundary is not None:
            total = total + batch.weights[2] * self._boundary_loss(batch, states, chosen & ~batch.is_leaf)
        return total

    def _query_loss(
        self, batch: GraphBatch, states: torch.Tensor, vectors: torch.Tensor, sums: MetricSums
    ) -> torch.Tensor:
        """Computes the summed cross-entropy of entity queries over all entities."""
        triples = batch.placed_triples()
        rows = triples[triples[:, QUERY_TAIL] > 0]
        if not len(rows):
            return states.sum() * 0.0
        predicted = self.predicted_entities(
            states[rows[:, TAIL_START]], rows[:, HEAD_ENTITY], rows[:, RELATION], vectors
        )
        loss, hits = linear_cross_entropy_and_hits(predicted, vectors, rows[:, QUERY_TAIL] - 1, self._loss_options)
        sums.add_target(ENTITY, batch.mean_weights[3], float(loss.detach()), float(len(rows)), hits=float(hits))
        return loss

    def predicted_entities(
        self, states: torch.Tensor, heads: torch.Tensor, relations: torch.Tensor, vectors: torch.Tensor
    ) -> torch.Tensor:
        """Returns the predicted entity vectors, (M, D). Their products with candidates' vectors are the logits.

        `states` (M, D) are hidden states of masked leaves, `heads` (M,) rows in the entity table or 0, and `vectors`
        (E, D) the entity table; relations are (M,).
        """
        assert self.model.entities is not None
        known = embed((heads - 1).clamp(min=0)[None], vectors)[0]
        tails = self.model.entities.predict_tails(known, relations)
        return self.model.predicted(states) + torch.where(heads[:, None] > 0, tails, 0.0)

    def _fact_loss(self, batch: GraphBatch, vectors: torch.Tensor, sums: MetricSums) -> torch.Tensor:
        """Computes the summed cross-entropy of the tails of the batch's facts, which are predicted without text."""
        assert self.model.entities is not None
        head, relation, tail = batch.facts.flatten(0, 1).unbind(1)
        predicted = self.model.entities.predict_tails(embed(head[None] - 1, vectors)[0], relation)
        loss = linear_cross_entropy(predicted, vectors, tail - 1, self._loss_options)
        sums.add_target(KGE, batch.mean_weights[4], float(loss.detach()), float(len(tail)))
        return loss

    def query_sums(self, batch: GraphBatch) -> Sums:
        sums = MetricSums()
        if batch.queries:
            self._query_loss(batch, self.states(batch), self.entity_vectors(), sums)
        return sums.take()

    def _boundary_loss(self, batch: GraphBatch, states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Computes the span boundary loss: masked roots are predicted from the roots around their span.

        It is summed and weighted.
        """
        assert self.model.boundary is not None
        if not bool(chosen.any()):
            return states.sum() * 0.0
        bounds = batch.bounds[chosen]
        offsets = batch.nodes[chosen, 0].long() - bounds[:, 0] - 1
        before, after = (bounds + batch.first_nodes()[chosen, None]).unbind(1)
        rows = self.model.boundary(embed(before[None], states)[0], embed(after[None], states)[0], offsets)
        loss = linear_cross_entropy(rows, self.model.embedding.weight, batch.targets[chosen], self._loss_options)
        weight = GraphTrainingConfig.of(self.config).sbo_weight
        self._sums.add_target(SBO, weight * batch.mean_weights[2], float(loss.detach()), float(len(rows)))
        return weight * loss

    def step_sums(self) -> Sums:
        return self._sums.take()

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        metrics = {"loss": self.mean_losses.total(sums), **masked_metrics(sums)}
        for name in (SBO, KGE):
            if count := sums.get(f"{name}_count"):
                metrics[f"{name}_loss"] = sums[f"{name}_loss"] / count
        return metrics

    def between_blocks(self, callback: Callable[[], None]) -> None:
        self.model.before_block = callback


def longest_span(config: Config) -> int | None:
    """Returns the maximum span of the span boundary loss in tokens, or None if that loss is off."""
    return max_span(config) if GraphTrainingConfig.of(config).sbo_weight else None

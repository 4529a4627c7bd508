"""Trains encoders on texts and a knowledge graph: masked tokens (MLM) and masked tails of triples (MNM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from sansgpu.config import ConfigError, change_config
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.section import problems
from sansgpu.data.forms.graphs import Triple
from sansgpu.data.order import generator
from sansgpu.events.progress import ReportProgress
from sansgpu.models.formats.folders import is_graph_folder
from sansgpu.models.formats.weights import set_weights
from sansgpu.tasks.base import ComposedTask, with_layers, with_vocabulary_of
from sansgpu.tasks.capabilities import ExtractsTriples, RanksEntities
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.tasks.graph.batch import GraphBatch, MaskRules, mask_example
from sansgpu.tasks.graph.costs import GraphEncoderCosts
from sansgpu.tasks.graph.data import GraphCorpus, graph_corpus, names_of
from sansgpu.tasks.graph.encoder import GraphEncoder
from sansgpu.tasks.graph.evaluate import EVALUATION_EXAMPLES, masked_evaluation
from sansgpu.tasks.graph.folder import export_graph_model, load_graph_folder
from sansgpu.tasks.graph.leafy import LeafyExample, PlacedTriple
from sansgpu.tasks.graph.link_prediction import SampledRanking, rank_tails
from sansgpu.tasks.graph.masked_prediction import (
    Facts,
    MaskedEvaluation,
    Masking,
    majority_of,
    mask_rules,
    validation_masking,
)
from sansgpu.tasks.graph.objective import GraphObjective, longest_span
from sansgpu.tasks.graph.settings import SETTINGS, GraphDataConfig, GraphModelConfig, GraphTrainingConfig, max_span
from sansgpu.tasks.graph.tokenizer import GraphCodec
from sansgpu.tasks.task import EvaluationRequest, ModelSource, Sums, TrainedModel

UNKNOWN = "-"  # data.dataset_name of an exported model, whose dataset is unknown
EXPECTED_RELATIONS = 32  # assumed if the data has not been read; the number hardly affects memory or speed


class Graph(RanksEntities, ExtractsTriples, ComposedTask):
    """`task: graph`."""

    settings = SETTINGS
    evaluator: MaskedEvaluation
    objective: GraphObjective

    def __init__(self, config: Config, corpus: GraphCorpus, effective_batch: int) -> None:
        objective = GraphObjective(config, names=corpus.entity_names)
        super().__init__(config, objective, corpus, effective_batch)
        self.fingerprint = corpus.fingerprint
        masked = corpus.train_targets / corpus.train_tokens
        costs = replace(self.costs(config), example_tokens=corpus.example_tokens, target_ratio=masked)
        self.flops_per_token = costs.work(1).needed
        training, rules = GraphTrainingConfig.of(config), mask_rules(config, corpus.codec.tokenizer)
        facts = Facts.of(corpus.train, GraphDataConfig.of(config).kge_triples)
        self._masking = Masking(corpus.train, rules, training.seed, facts=facts)
        held = validation_masking(corpus.validation, rules, training.seed)
        weights = training.mlm_weight, training.mnm_weight, training.entity_weight
        ranking = SampledRanking(objective, corpus.codec, corpus.held) if corpus.held else None
        self.evaluator = MaskedEvaluation(objective, held, majority_of(corpus.train), weights, ranking)

    @staticmethod
    def prepare(config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, GraphCorpus]:
        corpus = graph_corpus(config, cache, progress)
        config = with_vocabulary_of(config, corpus.codec.tokenizer.vocab_size)
        return _with_data_settings(config, corpus), corpus

    @classmethod
    def with_vocabulary(cls, config: Config) -> Config:
        model = GraphModelConfig.of(config)
        if model.leaf_slots and model.n_relations is None:
            config = config.with_values("model", n_relations=EXPECTED_RELATIONS)
        return super().with_vocabulary(config)

    @classmethod
    def new_objective(cls, config: Config, layers: int | None = None) -> GraphObjective:
        return GraphObjective(with_layers(config, layers))

    @staticmethod
    def random_batch(config: Config, size: int, tokens: int | None = None) -> GraphBatch:
        """Builds `size` random graphs of `tokens` nodes each, or by default with all leaf slots filled."""
        model, nodes = config.model, min(tokens or config.window, config.window)
        draws = generator(config.training.seed, "trial")
        examples = [_random_example(config, nodes, draws) for _ in range(size)]
        assert model.vocab_size is not None
        data = GraphDataConfig.of(config)
        ids = np.arange(model.vocab_size)
        rules = MaskRules(data.mask_ratio, max_span(config), data.leaf_mask_ratio, data.min_leaf_groups, 0, ids)
        masked_examples = [mask_example(e, rules, config.training.seed, 0, number) for number, e in enumerate(examples)]
        return GraphBatch.of(examples, masked_examples, _random_facts(config, size, draws))

    @classmethod
    def costs(cls, config: Config) -> GraphEncoderCosts:
        """Returns the costs. Assumes for memory that all leaf slots are filled, and for FLOPs that most are empty."""
        return GraphEncoderCosts(
            GraphModelConfig.of(config),
            config.training,
            config.window,
            config.roots,
            target_ratio=_masked_share(config),
            longest_span=longest_span(config),
            facts=GraphDataConfig.of(config).kge_triples,
        )

    def batch(self, step: int, total_steps: int | None = None) -> GraphBatch:
        """Returns the masked examples of a step with the loss weights at that step."""
        training = GraphTrainingConfig.of(self.config)
        ramp = min(1.0, (step + 1) / training.mnm_ramp_steps) if training.mnm_ramp_steps else 1.0
        batch = self._masking.of_step(step, self._effective_batch)
        return batch.weighed(
            training.mlm_weight, training.mnm_weight * ramp, training.mnm_reduction == "pooled", training.entity_weight
        )

    def carried_sums(self, sums: Sums) -> Sums:
        return self.objective.mean_losses.carried(sums)

    def save_tokenizer(self, folder: Path) -> None:
        self.corpus.codec.save(folder)

    def export(self, folder: Path) -> None:
        """Writes BERT's layout if it can represent the model, else sansgpu's own."""
        export_graph_model(self.model, self.corpus.codec, folder, exported_settings(self.config))

    @classmethod
    def recorded_settings(cls, config: Config, recorded: dict[str, Any]) -> list[str]:
        """Returns the recorded settings that depend on the data, if they are not configured.

        Runs that were recorded before such a setting existed get the value with the former behavior.
        """
        model = {"leaves": None, "n_entities": 0, **(recorded.get("model") or {})}
        open_keys = [key for key in ("leaves", "n_entities") if getattr(config.model, key) is None]
        older = "long_tails" not in (recorded.get("data") or {})
        known = [f"model.{key}={model[key]}" for key in open_keys if model[key] is not None]
        return known + ["data.long_tails=drop"] * older

    @classmethod
    def recognizes(cls, target: str) -> bool:
        return is_graph_folder(local_path(target))

    @classmethod
    def load(cls, source: ModelSource) -> tuple[GraphObjective, GraphCodec, Config]:
        if source.snapshot is None:
            (model, learned), codec = load_graph_folder(source.path), GraphCodec.load(source.path)
            config = _config_of(model, learned, source.path)
        else:
            assert source.config is not None
            assert source.tokenizer is not None
            config, codec = source.config, GraphCodec.load(source.tokenizer)
            model = GraphEncoder(GraphModelConfig.of(config), seed=None, longest_span=longest_span(config))
            set_weights(model, source.snapshot.weights(), source.snapshot.folder, assign=True)
        return GraphObjective(config, model.float(), names_of(codec)), codec, config

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return EVALUATION_EXAMPLES

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> MaskedEvaluation:
        return masked_evaluation(loaded, loaded.tokenizer, request)

    @classmethod
    def rank_entities(
        cls,
        loaded: TrainedModel,
        data: str | None,
        limit: int | None,
        progress: ReportProgress,
        warn: Callable[[str], None],
    ) -> dict[str, Any]:
        return rank_tails(loaded, data, limit, progress, warn)

    @classmethod
    def export_model(cls, loaded: TrainedModel, folder: Path, merge: bool | None) -> None:
        export_graph_model(loaded.objective.model, loaded.tokenizer, folder, exported_settings(loaded.config))


def _config_of(model: GraphEncoder, learned: dict[str, Any], folder: Path) -> Config:
    data = {"dataset_name": UNKNOWN, **learned.get("data", {})}
    try:
        return SCHEMA.model_validate(
            {"task": Graph.settings.task, "model": model.config.model_dump(), **learned, "data": data}
        )
    except ValidationError as error:
        raise ConfigError(
            f"{folder}: config.json is not valid ({'; '.join(problems(error, SCHEMA))}); export the model again."
        ) from None


def exported_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the settings that extraction and evaluation need from an exported model."""
    data = ["max_length", "doc_stride", "triples", "inverse_relations", "mask_ratio", "max_span"]
    data += ["leaf_mask_ratio", "min_leaf_groups", "entity_query_ratio", "kge_triples"]
    training = ["mlm_weight", "mnm_weight", "entity_weight", "seed"]
    return {
        "data": {key: getattr(config.data, key) for key in data},
        "training": {key: getattr(config.training, key) for key in training},
    }


def _masked_share(config: Config) -> float:
    """Returns the expected share of masked nodes if every leaf slot is filled."""
    leaves, data = GraphModelConfig.of(config).leaf_slots, GraphDataConfig.of(config)
    return (data.mask_ratio + leaves * data.leaf_mask_ratio) / (1 + leaves)


def _with_data_settings(config: Config, corpus: GraphCorpus) -> Config:
    """Sets what depends on the data. Raises ConfigError if a configured number is too small for it."""
    model, codec = GraphModelConfig.of(config), corpus.codec
    if model.leaves == 0:
        return config
    counts = {"n_relations": max(1, len(codec.relations)), "n_entities": len(codec.entities)}
    for key, count in counts.items():
        if (configured := getattr(model, key)) is not None and configured < count:
            raise ConfigError(f"model.{key} is {configured}, but the data has {count}; raise it or remove it.")
    settled = {key: count for key, count in counts.items() if getattr(model, key) is None} | {"leaves": corpus.leaves}
    return change_config(config, [f"model.{key}={count}" for key, count in settled.items()])


def _random_facts(config: Config, size: int, draws: np.random.Generator) -> np.ndarray | None:
    """Draws K facts per example, (B, K, 3); None if the model has no entity table or K is 0."""
    model, each = GraphModelConfig.of(config), GraphDataConfig.of(config).kge_triples
    if not model.n_entities or not each:
        return None
    ends = [1 + draws.integers(count, size=(size, each)) for count in (model.n_entities, model.n_relations or 1)]
    return np.stack((ends[0], ends[1], ends[0]), axis=2)


def _random_example(config: Config, nodes: int, draws: np.random.Generator) -> LeafyExample:
    """Draws random roots, and attaches tails to the first ones up to `nodes` nodes. The first is an entity query."""
    model = GraphModelConfig.of(config)
    entities = model.n_entities or 0
    assert model.vocab_size is not None
    roots = min(config.roots, nodes - 1 if entities else nodes)
    tokens = draws.integers(model.vocab_size, size=roots)
    placed, left = [], nodes - roots
    for root in range(roots):
        leaves = min(model.leaf_slots, left)
        if leaves:
            tail = draws.integers(model.vocab_size, size=leaves)
            relation = 1 + int(draws.integers(model.n_relations or 1))
            numbers = (1, 1 + int(draws.integers(entities))) if entities and not root else (0, 0)
            is_query = entities > 0 and not root
            placed.append(PlacedTriple(root, 1, relation, tail, Triple("", "", ""), numbers, is_query))
            left -= leaves
    return LeafyExample(tokens, np.ones(roots, bool), placed)

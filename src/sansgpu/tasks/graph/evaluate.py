"""Evaluates trained masked language models and graph encoders on their own or other data."""

from __future__ import annotations

from sansgpu.config import ConfigError
from sansgpu.tasks.graph.data import graph_corpus, leafy_rules, read_graphs
from sansgpu.tasks.graph.leafy import LeafyDataset, build_leafy
from sansgpu.tasks.graph.link_prediction import SampledRanking
from sansgpu.tasks.graph.masked_prediction import MaskedEvaluation, majority_of, mask_rules, validation_masking
from sansgpu.tasks.graph.settings import GraphDataConfig, GraphTrainingConfig
from sansgpu.tasks.graph.sources import open_graph_part
from sansgpu.tasks.graph.tokenizer import GraphCodec
from sansgpu.tasks.task import EvaluationRequest, TrainedModel

EVALUATION_EXAMPLES = 16  # examples per micro-batch


def masked_evaluation(loaded: TrainedModel, codec: GraphCodec, request: EvaluationRequest) -> MaskedEvaluation:
    """Prepares the evaluation on masked held-out examples. Raises ConfigError.

    The majority baselines come from the run's training data.
    """
    config, source = loaded.config, loaded.source
    if request.objective:
        raise ConfigError(f"--objective has no effect on a run of task {config.task}; remove it.")
    majority, held_out, ranking = None, None, None
    if source.snapshot is not None:
        corpus = graph_corpus(config, request.cache, request.progress, codec)
        if not str(source.snapshot.state()["data"]).startswith(corpus.fingerprint):
            request.warn(
                f"the data of {source.target} has changed since the run was trained, so these metrics may differ from "
                "its recorded ones."
            )
        majority, held_out = majority_of(corpus.train), corpus.validation
        if corpus.held is not None and request.data is None:
            ranking = SampledRanking(loaded.objective, codec, corpus.held)
    if request.data is not None:
        held_out = _read(request.data, loaded, codec, request)
    assert held_out is not None
    training = GraphTrainingConfig.of(config)
    masking = validation_masking(held_out, mask_rules(config, codec.tokenizer), training.seed)
    weights = (training.mlm_weight, training.mnm_weight, training.entity_weight)
    return MaskedEvaluation(loaded.objective, masking, majority or majority_of(held_out), weights, ranking)


def _read(data: str, loaded: TrainedModel, codec: GraphCodec, request: EvaluationRequest) -> LeafyDataset:
    config, notes = loaded.config, list[str]()
    settings = config.data.model_copy(update={"dataset_config": None})
    source = open_graph_part(data, settings, notes.append, GraphDataConfig.of(config).inverse_relations)
    documents = read_graphs(source, config, request.progress)
    graphs = build_leafy(documents, codec.tokenizer, codec.relations, leafy_rules(config), entities=codec.entities)
    if note := graphs.note():
        notes.append(f"{data}: {note}.")
    for note in notes:
        request.warn(note)
    if not len(graphs):
        raise ConfigError(f"{data} has no examples to evaluate on; pass a different dataset.")
    return graphs

"""Evaluation of masked language models and graph encoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from sansgpu.config import Config, ConfigError
from sansgpu.data.graph_sources import open_graph_part
from sansgpu.data.leafy import build_leafy
from sansgpu.data.mask_tokenizer import GraphCodec, from_pretrained
from sansgpu.data.shards import ReportProgress
from sansgpu.jobs.graph_model import EXAMPLES, is_graph, load_graph
from sansgpu.machine.probe import cache_dir, resolve_device
from sansgpu.tasks.graph_corpus import graph_corpus, leafy_rules, read_graphs
from sansgpu.tasks.masked_prediction import (
    ENTITY,
    KINDS,
    MaskedEvaluation,
    MaskedModel,
    majority_of,
    mask_rules,
    validation_masking,
)
from sansgpu.train.evaluate import evaluate
from sansgpu.train.snapshots import Snapshot
from sansgpu.train.step import StepPlan

WILSON_Z = 1.96  # normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class _Evaluated:
    model: MaskedModel
    codec: GraphCodec
    config: Config
    snapshot: Snapshot | None
    plan: StepPlan


def evaluate_graph(
    target: str,
    data: str | None,
    snapshot: str,
    progress: ReportProgress,
    warn: Callable[[str], None],
    remote_code: bool = False,
) -> dict[str, Any]:
    """Returns the eval event of a graph run on `data`, or on its own validation split, with 95 % intervals."""
    loaded = _load(target, snapshot, warn, remote_code)
    config, codec = loaded.config, loaded.codec
    cache = cache_dir(config.data.cache_dir)
    if loaded.snapshot is None and data is None:
        raise ConfigError(f"{target} is not a run, so it has no validation split; name a dataset with --data.")
    majority, held_out = None, None
    if loaded.snapshot is not None:
        corpus = graph_corpus(config, cache, progress, codec)
        if not str(loaded.snapshot.state()["data"]).startswith(corpus.fingerprint):
            warn(f"the data of {target} has changed since it was trained, so these metrics may not match its record.")
        majority, held_out = majority_of(corpus.train), corpus.validation
    if data is not None:
        notes: list[str] = []
        settings = config.data.model_copy(update={"dataset_config": None})
        source = open_graph_part(data, settings, notes.append, config.data.inverse_relations)
        documents = read_graphs(source, config, progress)
        held_out = build_leafy(
            documents, codec.tokenizer, codec.relations, leafy_rules(config), entities=codec.entities
        )
        if note := held_out.note():
            notes.append(f"{data}: {note}.")
        for note in notes:
            warn(note)
        if not len(held_out):
            raise ConfigError(f"{data} has no examples to evaluate on.")
    assert held_out is not None
    training = config.training
    masking = validation_masking(held_out, mask_rules(config, codec.tokenizer), training.seed)
    weights = (training.mlm_weight, training.mnm_weight, training.entity_weight)
    metrics = evaluate(MaskedEvaluation(loaded.model, masking, majority or majority_of(held_out), weights), loaded.plan)
    assert metrics is not None
    return {"event": "eval", "step": loaded.snapshot.step if loaded.snapshot else None, **_with_intervals(metrics)}


def _load(target: str, snapshot: str, warn: Callable[[str], None], remote_code: bool) -> _Evaluated:
    if is_graph(target):
        loaded = load_graph(target, snapshot, warn)
        return _Evaluated(loaded.objective, loaded.codec, loaded.config, loaded.snapshot, loaded.plan)
    from sansgpu.jobs.fine_tuned import load_fine_tuned  # imports transformers
    from sansgpu.tasks.masked_lm import MaskedObjective

    tuned = load_fine_tuned(target, "masked", snapshot, warn, remote_code)
    assert isinstance(tuned.objective, MaskedObjective)
    precision = tuned.snapshot.state()["environment"]["precision"] if tuned.snapshot else "fp32"
    device = resolve_device(tuned.config.training)
    cast(Any, tuned.objective.model).to(device)
    codec = GraphCodec(from_pretrained(tuned.tokenizer), ())
    return _Evaluated(tuned.objective, codec, tuned.config, tuned.snapshot, StepPlan(EXAMPLES, device, precision))


def _with_intervals(metrics: dict[str, float]) -> dict[str, Any]:
    """Adds a 95 % confidence interval to each accuracy (Wilson 1927)."""
    result: dict[str, Any] = dict(metrics)
    for name in (*KINDS, ENTITY, "tail"):
        if count := metrics.get(f"{name}_count"):
            result[f"{name}_interval"] = wilson(metrics[f"{name}_acc"], count)
    return result


def wilson(share: float, count: float) -> list[float]:
    """Returns the interval [low, high] of a proportion `share` observed in `count` samples."""
    z2 = WILSON_Z**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = WILSON_Z / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return [max(0.0, middle - half), min(1.0, middle + half)]

"""`sansgpu eval` of models that fill gaps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from sansgpu.config import Config, ConfigError
from sansgpu.data.graph_sources import open_graph_part
from sansgpu.data.leafy import build_leafy
from sansgpu.data.mask_tokenizer import GraphCodec, of_pretrained
from sansgpu.data.shards import Progress
from sansgpu.jobs.graph_model import EXAMPLES, is_graph, load_graph
from sansgpu.machine.probe import cache_dir, resolve_device
from sansgpu.tasks.filling import ENTITY, KINDS, Filler, Filling, held_masking, majority_of, mask_rules
from sansgpu.tasks.graph_corpus import graph_corpus, leafy_rules, read_graphs
from sansgpu.train.checkpoint import Snapshot
from sansgpu.train.evaluate import evaluate
from sansgpu.train.step import StepPlan

WILSON_Z = 1.96  # of an interval that holds the truth 95 times of 100


@dataclass(frozen=True)
class _Filler:
    model: Filler
    codec: GraphCodec
    config: Config
    snapshot: Snapshot | None
    plan: StepPlan


def evaluate_graph(
    target: str,
    data: str | None,
    snapshot: str,
    progress: Progress,
    warn: Callable[[str], None],
    remote_code: bool = False,
) -> dict[str, Any]:
    """The eval event of a run of task graph on `data`, or on its own validation part, with 95 % intervals."""
    filler = _load(target, snapshot, warn, remote_code)
    config, codec = filler.config, filler.codec
    cache = cache_dir(config.data.cache_dir)
    if filler.snapshot is None and data is None:
        raise ConfigError(f"{target} is no run and has no validation part of its own; name texts with --data.")
    majority, held = None, None
    if filler.snapshot is not None:
        corpus = graph_corpus(config, cache, progress, codec)
        if not str(filler.snapshot.state()["data"]).startswith(corpus.fingerprint):
            warn(f"the data of {target} is not what it was when it was trained.")
        majority, held = majority_of(corpus.train), corpus.validation
    if data is not None:
        notes: list[str] = []
        settings = config.data.model_copy(update={"dataset_config": None})
        source = open_graph_part(data, settings, notes.append, config.data.inverse_relations)
        documents = read_graphs(source, config, progress)
        held = build_leafy(documents, codec.tokenizer, codec.relations, leafy_rules(config), entities=codec.entities)
        if note := held.note():
            notes.append(f"{data}: {note}.")
        for note in notes:
            warn(note)
        if not len(held):
            raise ConfigError(f"{data} holds nothing to evaluate on.")
    assert held is not None
    training = config.training
    masking = held_masking(held, mask_rules(config, codec.tokenizer), training.seed)
    weights = (training.mlm_weight, training.mnm_weight, training.entity_weight)
    metrics = evaluate(Filling(filler.model, masking, majority or majority_of(held), weights), filler.plan)
    assert metrics is not None
    return {"event": "eval", "step": filler.snapshot.step if filler.snapshot else None, **_with_intervals(metrics)}


def _load(target: str, snapshot: str, warn: Callable[[str], None], remote_code: bool) -> _Filler:
    if is_graph(target):
        loaded = load_graph(target, snapshot, warn)
        return _Filler(loaded.objective, loaded.codec, loaded.config, loaded.snapshot, loaded.plan)
    from sansgpu.jobs.fine_tuned import load_fine_tuned  # imports transformers
    from sansgpu.tasks.masked import MaskedObjective

    tuned = load_fine_tuned(target, "masked", snapshot, warn, remote_code)
    assert isinstance(tuned.objective, MaskedObjective)
    precision = tuned.snapshot.state()["environment"]["precision"] if tuned.snapshot else "fp32"
    device = resolve_device(tuned.config.training)
    cast(Any, tuned.objective.model).to(device)
    codec = GraphCodec(of_pretrained(tuned.tokenizer), ())
    return _Filler(tuned.objective, codec, tuned.config, tuned.snapshot, StepPlan(EXAMPLES, device, precision))


def _with_intervals(metrics: dict[str, float]) -> dict[str, Any]:
    """Each accuracy with the interval that holds the true one 95 times of 100 (Wilson 1927)."""
    found: dict[str, Any] = dict(metrics)
    for name in (*KINDS, ENTITY, "tail"):
        if count := metrics.get(f"{name}_count"):
            found[f"{name}_interval"] = wilson(metrics[f"{name}_acc"], count)
    return found


def wilson(share: float, count: float) -> list[float]:
    """[low, high] of a share that was seen in so many draws."""
    z2 = WILSON_Z**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = WILSON_Z / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return [max(0.0, middle - half), min(1.0, middle + half)]

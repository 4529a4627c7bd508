"""Link prediction: ranks entities as the tails (or heads) of held-out triples with a graph encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sansgpu.config import Config, ConfigError
from sansgpu.data.graph import GraphDocument
from sansgpu.data.graph_sources import GraphSource, open_graphs
from sansgpu.data.shards import ReportProgress
from sansgpu.jobs.graph_model import LoadedGraph, load_graph
from sansgpu.tasks.graph_corpus import leafy_rules, read_graphs, split_by_group
from sansgpu.tasks.link_prediction import KnownFacts, LinkPrediction
from sansgpu.tasks.tail_prediction import TailPredictor

Documents = list[GraphDocument]


@dataclass(frozen=True)
class GraphParts:
    """Documents of a source by split."""

    train: Documents
    validation: Documents
    test: Documents


def link_prediction(
    target: str,
    data: str | None,
    snapshot: str,
    limit: int | None,
    progress: ReportProgress,
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Returns `tail` metrics of held-out triples, and `head` metrics if the model was trained with inverse relations.

    Queries the test split of `data`, or else its validation split, or else all of it. Without `data`, queries the run's
    own held-out triples that do not occur in training. All other triples of `data` and of the run are known facts,
    which filtered ranking excludes. `limit` is the maximum number of triples per side. Raises ConfigError if there is
    nothing to query.
    """
    loaded = load_triples_model(target, snapshot, warn)
    config = loaded.config
    own = run_parts(loaded, progress, warn)
    if data is not None:
        parts = own if own and data == config.data.dataset_name else open_all(config, data, progress, warn)
        queried = parts.test or parts.validation or parts.train
    elif own is not None:
        parts, queried = own, _unseen(own)
    else:
        raise ConfigError(f"{target} is not a run, so it has no triples of its own; name a dataset with --data.")
    if not any(document.triples for document in queried):
        raise ConfigError(f"{data or config.data.dataset_name} has no triples to rank; name another --data.")
    trained = own.train if own else parts.train if queried is not parts.train else []
    known = KnownFacts(trained, [d for p in (own, parts) if p for d in (*p.train, *p.validation, *p.test)])
    ranking = LinkPrediction(tail_predictor(loaded), loaded.codec, leafy_rules(config), known)
    step = loaded.snapshot.step if loaded.snapshot else None
    report = ranking.report(queried, config.data.inverse_relations, limit, progress)
    return {"event": "link_prediction", "step": step, **report}


def load_triples_model(target: str, snapshot: str, warn: Callable[[str], None]) -> LoadedGraph:
    """Loads a graph encoder. Raises ConfigError if it was trained without triples."""
    loaded = load_graph(target, snapshot, warn)
    if not loaded.config.model.leaf_slots or not loaded.relations:
        raise ConfigError(f"{target} was trained without triples, so it has no relations; give a run with triples.")
    return loaded


def tail_predictor(loaded: LoadedGraph) -> TailPredictor:
    return TailPredictor(loaded.objective, loaded.tokenizer.mask_id, loaded.plan.device, loaded.precision)


def run_parts(loaded: LoadedGraph, progress: ReportProgress, warn: Callable[[str], None]) -> GraphParts | None:
    """Returns a run's own data with its training split, or None for an exported folder."""
    if loaded.snapshot is None:
        return None
    return open_all(loaded.config, loaded.config.data.dataset_name, progress, warn)


def open_all(config: Config, name: str, progress: ReportProgress, warn: Callable[[str], None]) -> GraphParts:
    """Returns a source's splits. Splits off validation documents only for the run's own data without such a split."""
    own = name == config.data.dataset_name
    data = config.data.model_copy(
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
    return [
        document._replace(triples=tuple(triple for triple in document.triples if triple.fact not in known))
        for document in parts.test or parts.validation
    ]

"""`sansgpu eval --link-prediction`: how well a graph encoder ranks entities as the tails of held-out triples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sansgpu.config import Config, ConfigError
from sansgpu.data.graph import GraphDocument
from sansgpu.data.graph_sources import GraphSource, open_graphs
from sansgpu.data.shards import Progress
from sansgpu.jobs.graph_model import LoadedGraph, load_graph
from sansgpu.tasks.gaps import GapFiller
from sansgpu.tasks.graph_corpus import leafy_rules, read_graphs, split_by_group
from sansgpu.tasks.link_prediction import KnownFacts, LinkPrediction

Documents = list[GraphDocument]


@dataclass(frozen=True)
class Parts:
    """All documents of a source."""

    train: Documents
    validation: Documents
    test: Documents


def link_prediction(
    target: str,
    data: str | None,
    snapshot: str,
    limit: int | None,
    progress: Progress,
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Figures of the triples of `data`, or of those a run held out: `tail`, and `head` where it learned both ways.

    Of `data` its test part is asked for, else its validation part, else all of it; a run's own data has no triple
    asked that was trained on. All other parts, and all of the run's data, are known to be true. With `limit` of so
    many triples of each side. Raises ConfigError where there is nothing to ask.
    """
    loaded = load_triples_model(target, snapshot, warn)
    config = loaded.config
    own = run_parts(loaded, progress, warn)
    if data is not None:
        parts = own if own and data == config.data.dataset_name else open_all(config, data, progress, warn)
        held = parts.test or parts.validation or parts.train
    elif own is not None:
        parts, held = own, _unseen(own)
    else:
        raise ConfigError(f"{target} is no run and has no triples of its own; name some with --data.")
    if not any(document.triples for document in held):
        raise ConfigError(f"{data or config.data.dataset_name} holds no triples to ask for; name others with --data.")
    trained = own.train if own else parts.train if held is not parts.train else []
    known = KnownFacts(trained, [d for p in (own, parts) if p for d in (*p.train, *p.validation, *p.test)])
    ranking = LinkPrediction(filler_of(loaded), loaded.codec, leafy_rules(config), known)
    step = loaded.snapshot.step if loaded.snapshot else None
    report = ranking.report(held, config.data.inverse_relations, limit, progress)
    return {"event": "link_prediction", "step": step, **report}


def load_triples_model(target: str, snapshot: str, warn: Callable[[str], None]) -> LoadedGraph:
    """A graph encoder that learned triples. Raises ConfigError where it did not."""
    loaded = load_graph(target, snapshot, warn)
    if not loaded.config.model.leaf_slots or not loaded.relations:
        raise ConfigError(f"{target} learned no triples, so it knows no relation to ask for; take a run that did.")
    return loaded


def filler_of(loaded: LoadedGraph) -> GapFiller:
    """What asks the model."""
    return GapFiller(loaded.objective, loaded.tokenizer.mask_id, loaded.plan.device, loaded.precision)


def run_parts(loaded: LoadedGraph, progress: Progress, warn: Callable[[str], None]) -> Parts | None:
    """A run's own data, divided as it was for training; of an exported folder nothing is known."""
    if loaded.snapshot is None:
        return None
    return open_all(loaded.config, loaded.config.data.dataset_name, progress, warn)


def open_all(config: Config, name: str, progress: Progress, warn: Callable[[str], None]) -> Parts:
    """The parts of a source that is read as a run's is; divided only where it is the run's own and has no parts."""
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
    return Parts(train, validation, test)


def _unseen(parts: Parts) -> Documents:
    """The documents that are asked for, without the triples that were trained on."""
    known = frozenset(triple.fact for document in parts.train for triple in document.triples)
    return [
        document._replace(triples=tuple(triple for triple in document.triples if triple.fact not in known))
        for document in parts.test or parts.validation
    ]

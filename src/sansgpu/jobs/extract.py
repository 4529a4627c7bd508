"""`sansgpu extract`: triples read from texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.data.graph import GraphDocument
from sansgpu.data.graph_sources import open_graph_part
from sansgpu.data.shards import Progress
from sansgpu.jobs.graph_model import LoadedGraph
from sansgpu.jobs.link_prediction import filler_of, load_triples_model, run_parts
from sansgpu.tasks.extraction import Agreement, Extraction, ExtractionRules
from sansgpu.tasks.graph_corpus import leafy_rules, read_graphs


class Triples:
    """Triples to be read, once, in the order of the texts: {"doc", "head", "relation", "tail", "score"} of each."""

    def __init__(
        self, extraction: Extraction, agreement: Agreement, documents: list[GraphDocument], progress: Progress
    ) -> None:
        self._found, self._agreement = extraction.read(documents, progress), agreement

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for extracted in self._found:
            self._agreement.add(extracted)
            for triple in extracted.triples:
                yield {"doc": extracted.document.id, **triple._asdict()}

    def summary(self) -> dict[str, Any]:
        """Once all are read: how many there are, and how well they agree with the texts' own triples."""
        return {"event": "extraction", **self._agreement.summary()}


def extract(
    target: str,
    text: str | None,
    data: str | None,
    heads: Sequence[str],
    relations: Sequence[str],
    closed: bool,
    min_score: float | None,
    beams: int,
    top: int,
    snapshot: str,
    progress: Progress,
    warn: Callable[[str], None],
) -> Triples:
    """The triples of `text`, or of the documents of `data`; `top` tails of each head and relation, those of a score
    below `min_score` left out.

    Asked are all relations of training, inverse ones only by name; of the heads given, or else of each document's
    entities, the heads of its triples, or its words. With `closed` tails are chosen from the document's entities, or
    where it names none from all tails that were trained on. Raises ConfigError before any is read.
    """
    if (text is None) == (data is None):
        raise ConfigError("give either --text or --data, what triples are to be read from.")
    if text is not None and not text.strip():
        raise ConfigError("--text needs some text.")
    loaded = load_triples_model(target, snapshot, warn)
    config = loaded.config
    unknown = next((name for name in relations if name not in loaded.relations), None)
    if unknown is not None:
        raise ConfigError(f"--relation {unknown} was not learned; {target} knows {', '.join(loaded.relations)}.")
    if text is not None:
        documents = [GraphDocument("text", "text", text)]
    else:
        assert data is not None
        source = open_graph_part(data, config.data.model_copy(update={"dataset_config": None}), warn)
        documents = read_graphs(source, config, progress)
    needs_tails = closed and any(not document.entities for document in documents)
    rules = ExtractionRules(
        leafy_rules(config),
        loaded.relations,
        tuple(relations),
        tuple(heads),
        closed,
        _trained_tails(loaded, target, progress, warn) if needs_tails else (),
        beams,
        per_query=top,
        min_score=min_score,
    )
    extraction = Extraction(filler_of(loaded), loaded.codec, rules)
    return Triples(extraction, Agreement(loaded.tokenizer, rules), documents, progress)


def _trained_tails(
    loaded: LoadedGraph, target: str, progress: Progress, warn: Callable[[str], None]
) -> tuple[str, ...]:
    """All names that were tails in training."""
    own = run_parts(loaded, progress, warn)
    if own is None:
        raise ConfigError(
            f"{target} is no run, and the texts name no entities to choose tails from; leave out --closed."
        )
    return tuple(dict.fromkeys(triple.tail for document in own.train for triple in document.triples))

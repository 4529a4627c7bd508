"""Extracts triples from documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.data.forms.graphs import GraphDocument
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.tasks.graph.data import leafy_rules, read_graphs
from sansgpu.tasks.graph.extraction import Agreement, ExtractionRules, TripleExtractor
from sansgpu.tasks.graph.link_prediction import require_triples, run_parts, tail_predictor
from sansgpu.tasks.graph.sources import open_graph_part
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest, open_model


@dataclass(frozen=True)
class ExtractRequest:
    """Arguments of the extract command: triples are read from `text`, or else from the dataset `data`.

    `heads` defaults to each document's entities, or else the heads of its triples, or else its words. `relations`
    defaults to all of training except inverse ones. With `closed`, tails are chosen from the document's entities, or
    from all training tails if it has none.
    """

    model: ModelRequest
    text: str | None = None
    data: str | None = None
    heads: Sequence[str] = ()
    relations: Sequence[str] = ()
    closed: bool = False
    min_score: float | None = None
    beams: int = 10
    top: int = 1  # tails per head and relation


class Triples:
    """Single-use iterable of triples, in text order, with keys doc, head, relation, tail and score."""

    def __init__(
        self,
        extraction: TripleExtractor,
        agreement: Agreement,
        documents: list[GraphDocument],
        progress: ReportProgress,
    ) -> None:
        self._found, self._agreement = extraction.read(documents, progress), agreement

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for extracted in self._found:
            self._agreement.add(extracted)
            for triple in extracted.triples:
                yield {"doc": extracted.document.id, **triple._asdict()}

    def summary(self) -> dict[str, Any]:
        """Returns counts and, if the documents have triples, precision, recall and F1. Call it after iterating."""
        return {"event": "extraction", **self._agreement.summary()}


def extract(request: ExtractRequest, warn: Warn, progress: ReportProgress) -> Triples:
    """Returns the triples of the documents. Raises ConfigError before any document is processed."""
    target, text, data = request.model.target, request.text, request.data
    if (text is None) == (data is None):
        raise ConfigError("pass either --text or --data.")
    if text is not None and not text.strip():
        raise ConfigError("--text must not be empty.")
    loaded = open_model(request.model, "extract", warn, progress)
    require_triples(loaded)
    config, codec = loaded.config, loaded.tokenizer
    unknown = next((name for name in request.relations if name not in codec.relations), None)
    if unknown is not None:
        raise ConfigError(f"--relation {unknown} is unknown to {target}; choose from {', '.join(codec.relations)}.")
    if text is not None:
        documents = [GraphDocument("text", "text", text)]
    else:
        assert data is not None
        source = open_graph_part(data, config.data.model_copy(update={"dataset_config": None}), warn)
        documents = read_graphs(source, config, progress)
    needs_tails = request.closed and any(not document.entities for document in documents)
    rules = ExtractionRules(
        leafy_rules(config),
        codec.relations,
        tuple(request.relations),
        tuple(request.heads),
        request.closed,
        _trained_tails(loaded, target, progress, warn) if needs_tails else (),
        max(request.beams, request.top),
        per_query=request.top,
        min_score=request.min_score,
    )
    extraction = TripleExtractor(tail_predictor(loaded), codec, rules)
    return Triples(extraction, Agreement(codec.tokenizer, rules), documents, progress)


def _trained_tails(loaded: TrainedModel, target: str, progress: ReportProgress, warn: Warn) -> tuple[str, ...]:
    own = run_parts(loaded, progress, warn)
    if own is None:
        raise ConfigError(
            f"--closed requires tails to choose from, but {target} is not a run and the documents have no entities; "
            "remove --closed."
        )
    return tuple(dict.fromkeys(triple.tail for document in own.train for triple in document.triples))

"""Opens datasets of texts with triples: files of rows, folders of .tsv files, plain text, or Python's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sansgpu.config import PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, DataConfig
from sansgpu.config.paths import local_path
from sansgpu.data.files import TEXT_SUFFIXES, file_form, read_documents, read_rows
from sansgpu.data.graph import GraphDocument
from sansgpu.data.graph_rows import FACT_KEYS, EntityText, Fact, read_graph_row, text_document
from sansgpu.data.headers import has_bare_triples
from sansgpu.data.knowledge import fact_documents, knowledge_documents, knowledge_parts, named_entity
from sansgpu.data.rows import BadRows
from sansgpu.data.sources import Source, files_fingerprint, open_parts
from sansgpu.data.stdlib_graph import stdlib_documents

READER = 1  # increment if the same files produce different documents


@dataclass(frozen=True)
class GraphSource:
    """A corpus of documents with triples. `fingerprint` identifies its content and the way it is read.

    `documents` yields them in a fixed order. It raises ConfigError at an invalid row, unless `data.on_bad_row` is skip.
    """

    name: str
    fingerprint: str
    documents: Callable[[], Iterator[GraphDocument]]


@dataclass(frozen=True)
class GraphSources:
    """The training split and, if the data has them, the validation and test splits."""

    train: GraphSource
    validation: GraphSource | None
    test: GraphSource | None


def open_graphs(data: DataConfig, note: Callable[[str], None], inverse: bool = False) -> GraphSources:
    """Opens the configured sources. Raises ConfigError if the data does not exist.

    With `inverse`, each fact is added to its tail's document as an inverse relation. After each pass over the data,
    `note` is called with a message about the skipped rows, if any.
    """
    graphs = _open(data.dataset_name, data, note, inverse)
    if data.validation_name:
        other = _open(data.validation_name, data, note, inverse)
        return replace(graphs, validation=other.validation or other.train)
    return graphs


def open_graph_part(name: str, data: DataConfig, note: Callable[[str], None], inverse: bool = False) -> GraphSource:
    """Opens one source to evaluate on: its test split if it has one, else its validation split, else all of it."""
    graphs = _open(name, data, note, inverse)
    return graphs.test or graphs.validation or graphs.train


def _open(name: str, data: DataConfig, note: Callable[[str], None], inverse: bool) -> GraphSources:
    if name == PYTHON_STDLIB_GRAPH:
        files = open_parts(PYTHON_STDLIB, data).train.files
        fingerprint = files_fingerprint(files, (READER,))
        return GraphSources(GraphSource(name, fingerprint, partial(stdlib_documents, files)), None, None)
    settings = READER, data.on_bad_row, inverse

    def knowledge(part: str, files: Mapping[str, Path]) -> GraphSource:
        title = name if part == "train" else f"{name} ({part})"
        read = partial(_knowledge_documents, title, files, data, note, inverse)
        return GraphSource(title, files_fingerprint(files, settings), read)

    def rows(source: Source) -> GraphSource:
        read = partial(_source_documents, source, data, note, inverse)
        return GraphSource(source.name, files_fingerprint({}, (source.fingerprint, *settings)), read)

    made = {part: knowledge(part, files) for part, files in knowledge_parts(local_path(name)).items()}
    if not made:
        splits = open_parts(name, data)
        parts = ("train", splits.train), ("validation", splits.validation), ("test", splits.test)
        made = {part: rows(source) for part, source in parts if source}
    return GraphSources(made["train"], made.get("validation"), made.get("test"))


def _knowledge_documents(
    name: str, files: Mapping[str, Path], data: DataConfig, note: Callable[[str], None], inverse: bool
) -> Iterator[GraphDocument]:
    bad_rows = BadRows(data.on_bad_row)
    yield from knowledge_documents(files, bad_rows, inverse)
    bad_rows.report(lambda message: note(f"{name}: {message}"))


def _source_documents(
    source: Source, data: DataConfig, note: Callable[[str], None], inverse: bool
) -> Iterator[GraphDocument]:
    """Yields the texts in order, then the documents of entities with facts, which need all rows to be read first."""
    bad_rows = BadRows(data.on_bad_row)
    made = list(_source_items(source, data, bad_rows, note))
    bad_rows.report(lambda message: note(f"{source.name}: {message}"))
    facts = [item for item in made if isinstance(item, Fact)]
    described = [item for item in made if isinstance(item, EntityText)]
    for item in made:
        document = item.document if isinstance(item, EntityText) and not facts else item
        if isinstance(document, GraphDocument) and document.text.strip():
            yield document
    entities = {item.document.id: named_entity(item.name, item.document.text) for item in reversed(described)}
    yield from fact_documents(facts, entities, inverse)


def _source_items(
    source: Source, data: DataConfig, bad_rows: BadRows, note: Callable[[str], None]
) -> Iterator[GraphDocument | EntityText | Fact]:
    read = partial(read_graph_row, column=data.text_column)
    if not source.files:
        yield from bad_rows.parsed(source.rows(), read)
    for name, path in source.files.items():
        if file_form(path) in TEXT_SUFFIXES:
            pieces = read_documents(path, None, skip_undecodable=source.name == PYTHON_STDLIB)
            yield text_document(name, "".join(piece.text for piece in pieces))
        else:
            names = FACT_KEYS if has_bare_triples(path, data) else None
            if names:
                columns = ", ".join(f"{name} = column {number}" for number, name in enumerate(names))
                note(f"{path}: its first line is a triple, so it has no header: {columns}.")
            yield from bad_rows.parsed(read_rows(path, names or data.has_header), read)

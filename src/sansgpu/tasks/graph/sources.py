"""Opens datasets of texts with triples: files of rows, folders of .tsv files, plain text, or Python's library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sansgpu.config import PYTHON_STDLIB, PYTHON_STDLIB_GRAPH
from sansgpu.config.data import DataConfig
from sansgpu.config.paths import local_path
from sansgpu.data.files import read_documents, read_rows
from sansgpu.data.formats.dialects import FileFormat
from sansgpu.data.formats.names import TEST_NAMES, TEXT_SUFFIXES, VALIDATION_NAMES, file_form
from sansgpu.data.forms.graphs import (
    FACT_KEYS,
    GRAPHS,
    INVERSE,
    EntityText,
    Fact,
    GraphDocument,
    Triple,
    has_bare_triples,
    text_document,
)
from sansgpu.data.lines import read_lines
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.data.sources import Source, files_fingerprint, open_parts
from sansgpu.data.tables import Columns
from sansgpu.files.reading import require_regular_file
from sansgpu.tasks.graph.stdlib import stdlib_documents

TRAIN_FILE = "train.tsv"
ENTITY_FILE, DESCRIPTION_FILE, RELATION_FILE = "entity2text.txt", "entity2textlong.txt", "relation2text.txt"
TEXT_FILES = (ENTITY_FILE, DESCRIPTION_FILE, RELATION_FILE)


class NamedText(NamedTuple):
    """An entity's name and a text that starts with it."""

    name: str
    text: str


def named_entity(name: str, text: str) -> NamedText:
    """Prepends the name to `text`, unless it starts with it (ignoring case). An empty text becomes the name."""
    if re.match(rf"{re.escape(name)}(?!\w)", text, re.IGNORECASE):
        return NamedText(name, text)
    return NamedText(name, f"{name}: {text}" if text.strip() else name)


def fact_documents(facts: Iterable[Fact], entities: Mapping[str, NamedText], inverse: bool) -> Iterator[GraphDocument]:
    """Yields a document for each head and for each fact with qualifiers, in order of first appearance.

    An id that is not in `entities` is used as name and text. With `inverse`, each fact is also added to its tail's
    document as an inverse relation.
    """
    groups: dict[str | Fact, list[Fact]] = {}
    for fact in _with_inverses(facts) if inverse else facts:
        groups.setdefault(fact if fact.qualifiers else fact.head, []).append(fact)
    numbers: Counter[str] = Counter()
    for group in groups.values():
        name = head = group[0].head
        if group[0].qualifiers:
            name = f"{head}:{numbers[head]}"
            numbers[head] += 1
        yield _document(group, entities, name)


def _with_inverses(facts: Iterable[Fact]) -> Iterator[Fact]:
    for fact in facts:
        yield fact
        yield fact._replace(head=fact.tail, relation=INVERSE + fact.relation, tail=fact.head)


def _document(facts: list[Fact], entities: Mapping[str, NamedText], name: str) -> GraphDocument:
    """Builds the document for facts with the same head and qualifiers."""

    def entity(key: str) -> NamedText:
        return entities.get(key, NamedText(key, key))

    head = entity(facts[0].head)
    span = 0, len(head.name)
    text = head.text + "".join(f"; {key} {entity(value).name}" for key, value in facts[0].qualifiers)
    triples = [Triple(head.name, f.relation, entity(f.tail).name, span, f.head, f.tail) for f in facts]
    return GraphDocument(name, facts[0].head, text, tuple(dict.fromkeys(triples)), about=facts[0].head)


def knowledge_parts(folder: Path) -> dict[str, Mapping[str, Path]]:
    """Returns the .tsv files for each split of GraphSources, by name; {} if `folder` has no train.tsv."""
    parts = {
        "train": [TRAIN_FILE],
        "validation": [f"{name}.tsv" for name in VALIDATION_NAMES],
        "test": [f"{name}.tsv" for name in TEST_NAMES],
    }
    if not (folder / TRAIN_FILE).is_file():
        return {}
    for name in (name for names in parts.values() for name in (*names, *TEXT_FILES)):
        require_regular_file(folder / name)
    there = {part: next((name for name in names if (folder / name).is_file()), None) for part, names in parts.items()}
    texts = [name for name in TEXT_FILES if (folder / name).is_file()]
    return {part: {file: folder / file for file in (name, *texts)} for part, name in there.items() if name}


def knowledge_documents(
    files: Mapping[str, Path], bad_rows: RowReport, inverse: bool, encoding: str
) -> Iterator[GraphDocument]:
    """Yields the documents of a split, from files with its triples, entity texts and relation names.

    Raises ConfigError if a file cannot be read.
    """
    triples, *_ = files.values()
    entities = _entities(files, bad_rows, encoding)
    relations = {key: text for key, text in _texts(files.get(RELATION_FILE), bad_rows, encoding) if text}

    def fact(row: SourceRow) -> Fact:
        columns = row.readable_value()
        if len(columns) != 3 or not all(columns):
            raise row.error("it needs three columns: head, relation and tail")
        head, relation, tail = columns
        return Fact(head, relations.get(relation, relation.removeprefix("_").replace("_", " ")), tail)

    lines = (line for line in _lines(triples, encoding) if line.value != [*FACT_KEYS])  # some files have a header
    yield from fact_documents(bad_rows.parsed(lines, fact), entities, inverse)


def _entities(files: Mapping[str, Path], bad_rows: RowReport, encoding: str) -> dict[str, NamedText]:
    """Reads entity files in KG-BERT's formats: names and descriptions (FB15k-237), or one text per entity (WN18RR).

    Without a file of descriptions, the name of an entity is its text up to the first ", ".
    """
    texts = {key: text for key, text in _texts(files.get(ENTITY_FILE), bad_rows, encoding) if text}
    if DESCRIPTION_FILE not in files:
        return {key: NamedText(text.partition(", ")[0] or text, text) for key, text in texts.items()}
    descriptions = dict(_texts(files[DESCRIPTION_FILE], bad_rows, encoding))
    return {key: named_entity(texts.get(key, key), descriptions.get(key, "")) for key in {**texts, **descriptions}}


def _texts(path: Path | None, bad_rows: RowReport, encoding: str) -> Iterator[tuple[str, str]]:
    def pair(row: SourceRow) -> tuple[str, str]:
        columns = row.readable_value()
        if len(columns) != 2 or not columns[0]:
            raise row.error("it needs two columns: an id and a text")
        return columns[0], columns[1]

    if path:
        yield from bad_rows.parsed(_lines(path, encoding), pair)


def _lines(path: Path, encoding: str) -> Iterator[SourceRow]:
    """Yields the non-empty lines as lists of stripped columns."""
    for line in read_lines(path, encoding=encoding):
        if line.problem is None:
            line = line._replace(value=[column.strip() for column in line.value.split("\t")])
        yield line


READER = 1  # version of the parsing code; increment it if the same files give different documents


@dataclass(frozen=True)
class GraphSource:
    """A corpus of documents with triples. `fingerprint` identifies its content and how it is read.

    `documents` yields the documents in a fixed order, and raises ConfigError at an invalid row, unless data.on_bad_row
    is skip.
    """

    name: str
    fingerprint: str
    documents: Callable[[], Iterator[GraphDocument]]


@dataclass(frozen=True)
class GraphSources:
    """The splits of a dataset; validation and test are optional."""

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
    """Opens a dataset to evaluate on: its test split, or else its validation split, or else all of it."""
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
        return GraphSource(title, files_fingerprint(files, (*settings, *Columns.of(data).format.settings)), read)

    def rows(source: Source) -> GraphSource:
        read = partial(_source_documents, source, data, note, inverse)
        return GraphSource(source.name, files_fingerprint({}, (source.fingerprint, *settings)), read)

    made = {part: knowledge(part, files) for part, files in knowledge_parts(local_path(name)).items()}
    if not made:
        splits = open_parts(name, data)
        for message in splits.notes:
            note(message)
        parts = ("train", splits.train), ("validation", splits.validation), ("test", splits.test)
        made = {part: rows(source) for part, source in parts if source}
    return GraphSources(made["train"], made.get("validation"), made.get("test"))


def _knowledge_documents(
    name: str, files: Mapping[str, Path], data: DataConfig, note: Callable[[str], None], inverse: bool
) -> Iterator[GraphDocument]:
    bad_rows = RowReport.of(data)
    yield from knowledge_documents(files, bad_rows, inverse, data.encoding)
    bad_rows.report(lambda message: note(f"{name}: {message}"))


def _source_documents(
    source: Source, data: DataConfig, note: Callable[[str], None], inverse: bool
) -> Iterator[GraphDocument]:
    """Yields texts in order, and then the documents of entities with facts, which need all rows to be read first."""
    bad_rows = RowReport.of(data)
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
    source: Source, data: DataConfig, bad_rows: RowReport, note: Callable[[str], None]
) -> Iterator[GraphDocument | EntityText | Fact]:
    columns = Columns.of(data)
    read = partial(GRAPHS.read, columns=columns, report=bad_rows)
    if not source.files:
        yield from bad_rows.parsed(source.rows(), read)
    for name, path in source.files.items():
        if file_form(path) in TEXT_SUFFIXES:
            configured = FileFormat(encoding=data.encoding)
            pieces = read_documents(path, None, source.name == PYTHON_STDLIB, configured=configured)
            yield text_document(name, "".join(piece.text for piece in pieces))
        else:
            names = FACT_KEYS if has_bare_triples(path, columns) else None
            if names:
                found = ", ".join(f"{name} = column {number}" for number, name in enumerate(names))
                note(f"{path}: its first line is a triple, so the file is read without a header: {found}.")
            configured = FileFormat(data.separator, data.encoding)  # a name such as NA is no empty cell
            yield from bad_rows.parsed(read_rows(path, names or columns.has_header, None, configured), read)

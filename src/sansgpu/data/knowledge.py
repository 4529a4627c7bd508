"""Builds documents from facts: the description of an entity with all triples that have it as their head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sansgpu.config.plain_data import require_regular_file
from sansgpu.data.files import read_lines
from sansgpu.data.graph import INVERSE, GraphDocument, Triple
from sansgpu.data.graph_rows import FACT_KEYS, Fact
from sansgpu.data.rows import BadRows, SourceRow
from sansgpu.data.sources import TEST_NAMES, VALIDATION_NAMES

TRAIN_FILE = "train.tsv"
ENTITY_FILE, DESCRIPTION_FILE, RELATION_FILE = "entity2text.txt", "entity2textlong.txt", "relation2text.txt"
TEXT_FILES = (ENTITY_FILE, DESCRIPTION_FILE, RELATION_FILE)


class NamedText(NamedTuple):
    """An entity's name and a text that begins with it."""

    name: str
    text: str


def named_entity(name: str, text: str) -> NamedText:
    """Prefixes `text` with the name unless it begins with it (ignoring case); an empty text becomes the name."""
    if re.match(rf"{re.escape(name)}(?!\w)", text, re.IGNORECASE):
        return NamedText(name, text)
    return NamedText(name, f"{name}: {text}" if text.strip() else name)


def fact_documents(facts: Iterable[Fact], entities: Mapping[str, NamedText], inverse: bool) -> Iterator[GraphDocument]:
    """Yields a document for each head and for each fact with qualifiers, in order of first appearance.

    An id that is not in `entities` is its own name and text. With `inverse`, each fact is added to its tail's document
    as an inverse relation.
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
    """Builds the document of facts that share the head and the qualifiers."""

    def entity(key: str) -> NamedText:
        return entities.get(key, NamedText(key, key))

    head = entity(facts[0].head)
    span = 0, len(head.name)
    text = head.text + "".join(f"; {key} {entity(value).name}" for key, value in facts[0].qualifiers)
    triples = [Triple(head.name, f.relation, entity(f.tail).name, span, f.head, f.tail) for f in facts]
    return GraphDocument(name, facts[0].head, text, tuple(dict.fromkeys(triples)), about=facts[0].head)


def knowledge_parts(folder: Path) -> dict[str, Mapping[str, Path]]:
    """Returns the .tsv files of each split, by its name in GraphSources; empty if `folder` has no train.tsv."""
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


def knowledge_documents(files: Mapping[str, Path], bad_rows: BadRows, inverse: bool) -> Iterator[GraphDocument]:
    """Yields the documents of one split from its triples, the texts of entities and the names of relations.

    Raises ConfigError if a file cannot be read.
    """
    triples, *_ = files.values()
    entities = _entities(files, bad_rows)
    relations = {key: text for key, text in _texts(files.get(RELATION_FILE), bad_rows) if text}

    def fact(row: SourceRow) -> Fact:
        columns = row.readable_value()
        if len(columns) != 3 or not all(columns):
            raise row.error("it does not have three columns: head, relation and tail")
        head, relation, tail = columns
        return Fact(head, relations.get(relation, relation.removeprefix("_").replace("_", " ")), tail)

    lines = (line for line in _lines(triples) if line.value != [*FACT_KEYS])  # some files have a header
    yield from fact_documents(bad_rows.parsed(lines, fact), entities, inverse)


def _entities(files: Mapping[str, Path], bad_rows: BadRows) -> dict[str, NamedText]:
    """Reads KG-BERT's files of entities, as of FB15k-237 with names and descriptions, or of WN18RR with one text each.

    Without a file of descriptions, the name is the text up to the first ", ".
    """
    texts = {key: text for key, text in _texts(files.get(ENTITY_FILE), bad_rows) if text}
    if DESCRIPTION_FILE not in files:
        return {key: NamedText(text.partition(", ")[0] or text, text) for key, text in texts.items()}
    descriptions = dict(_texts(files[DESCRIPTION_FILE], bad_rows))
    return {key: named_entity(texts.get(key, key), descriptions.get(key, "")) for key in {**texts, **descriptions}}


def _texts(path: Path | None, bad_rows: BadRows) -> Iterator[tuple[str, str]]:
    def pair(row: SourceRow) -> tuple[str, str]:
        columns = row.readable_value()
        if len(columns) != 2 or not columns[0]:
            raise row.error("it does not have two columns: an id and its text")
        return columns[0], columns[1]

    if path:
        yield from bad_rows.parsed(_lines(path), pair)


def _lines(path: Path) -> Iterator[SourceRow]:
    """Yields the non-empty lines as lists of stripped columns."""
    for line in read_lines(path):
        if line.problem is None:
            line = line._replace(value=[column.strip() for column in line.value.split("\t")])
        yield line

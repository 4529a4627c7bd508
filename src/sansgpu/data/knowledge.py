"""Triples of entities -> documents: what is said of an entity, with all triples whose head it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sansgpu.data.files import Row, read_lines
from sansgpu.data.graph import INVERSE, GraphDocument, Triple
from sansgpu.data.graph_rows import BadRows, Fact, bad_row
from sansgpu.data.sources import TEST_NAMES, VALIDATION_NAMES
from sansgpu.machine.inputs import require_ordinary

TRAIN_FILE, ENTITY_FILE, RELATION_FILE = "train.tsv", "entity2text.txt", "relation2text.txt"


class NamedText(NamedTuple):
    """A name and a text that begins with it."""

    name: str
    text: str


def named_entity(name: str, text: str) -> NamedText:
    """The name is put before a text that does not begin with it, in capitals or not; it is all where there is none."""
    if re.match(rf"{re.escape(name)}(?!\w)", text, re.IGNORECASE):
        return NamedText(name, text)
    return NamedText(name, f"{name}: {text}" if text.strip() else name)


def fact_documents(facts: Iterable[Fact], entities: Mapping[str, NamedText], inverse: bool) -> Iterator[GraphDocument]:
    """A document for each head, and for each fact with qualifiers, in the order in which they first appear.

    Of an id that is no key of `entities` it is itself the name and the text. With `inverse` each fact stands in its
    tail's document too, turned round.
    """
    together: dict[str | Fact, list[Fact]] = {}
    for fact in _both_ways(facts) if inverse else facts:
        together.setdefault(fact if fact.qualifiers else fact.head, []).append(fact)
    numbers: Counter[str] = Counter()
    for said in together.values():
        name = head = said[0].head
        if said[0].qualifiers:
            name = f"{head}:{numbers[head]}"
            numbers[head] += 1
        yield _document(said, entities, name)


def _both_ways(facts: Iterable[Fact]) -> Iterator[Fact]:
    for fact in facts:
        yield fact
        yield fact._replace(head=fact.tail, relation=INVERSE + fact.relation, tail=fact.head)


def _document(facts: list[Fact], entities: Mapping[str, NamedText], name: str) -> GraphDocument:
    """Of facts with one head and the same qualifiers."""

    def entity(key: str) -> NamedText:
        return entities.get(key, NamedText(key, key))

    head = entity(facts[0].head)
    span = 0, len(head.name)
    text = head.text + "".join(f"; {key} {entity(value).name}" for key, value in facts[0].qualifiers)
    triples = [Triple(head.name, f.relation, entity(f.tail).name, span, f.head, f.tail) for f in facts]
    return GraphDocument(name, facts[0].head, text, tuple(dict.fromkeys(triples)), about=facts[0].head)


def knowledge_parts(folder: Path) -> dict[str, Mapping[str, Path]]:
    """Files of each part of a folder of .tsv, by the parts' names in GraphSources; none where it is no such folder."""
    parts = {
        "train": [TRAIN_FILE],
        "validation": [f"{name}.tsv" for name in VALIDATION_NAMES],
        "test": [f"{name}.tsv" for name in TEST_NAMES],
    }
    if not (folder / TRAIN_FILE).is_file():
        return {}
    for name in (name for names in parts.values() for name in (*names, ENTITY_FILE, RELATION_FILE)):
        require_ordinary(folder / name)
    there = {part: next((name for name in names if (folder / name).is_file()), None) for part, names in parts.items()}
    texts = [name for name in (ENTITY_FILE, RELATION_FILE) if (folder / name).is_file()]
    return {part: {file: folder / file for file in (name, *texts)} for part, name in there.items() if name}


def knowledge_documents(files: Mapping[str, Path], bad_rows: BadRows, inverse: bool) -> Iterator[GraphDocument]:
    """Documents of one part: its file of triples, the texts of entities and the names of relations.

    An entity's name is its text up to the first comma and space. Raises ConfigError where a file cannot be read.
    """
    triples, *_ = files.values()
    entities = {key: _described_entity(text) for key, text in _texts(files.get(ENTITY_FILE), bad_rows) if text}
    relations = {key: text for key, text in _texts(files.get(RELATION_FILE), bad_rows) if text}

    def fact(row: Row) -> Fact:
        if len(row.value) != 3 or not all(row.value):
            raise bad_row(row, "it has not three columns: head, relation and tail")
        head, relation, tail = row.value
        return Fact(head, relations.get(relation, relation.removeprefix("_").replace("_", " ")), tail)

    yield from fact_documents(bad_rows.leave_out(_lines(triples), fact), entities, inverse)


def _described_entity(text: str) -> NamedText:
    return NamedText(text.partition(", ")[0] or text, text)


def _texts(path: Path | None, bad_rows: BadRows) -> Iterator[tuple[str, str]]:
    def pair(row: Row) -> tuple[str, str]:
        if len(row.value) != 2 or not row.value[0]:
            raise bad_row(row, "it has not two columns: an id and its text")
        return row.value[0], row.value[1]

    if path:
        yield from bad_rows.leave_out(_lines(path), pair)


def _lines(path: Path) -> Iterator[Row]:
    """Lines that are not empty, each a list of its columns without white space at their ends."""
    for line in read_lines(path):
        if line.problem is None:
            line = line._replace(value=[column.strip() for column in line.value.split("\t")])
        yield line

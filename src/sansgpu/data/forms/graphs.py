"""Rows of a knowledge graph: texts with triples, facts without text, descriptions of entities, DocRED documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sansgpu.config.wording import counted
from sansgpu.data.forms.form import Form, Forms, any_row
from sansgpu.data.rows import TEXT_NAMES, Row, SourceRow, row_text
from sansgpu.data.tables import Columns, FirstLine, is_table, table_lines

_Span: TypeAlias = tuple[int, int]  # characters [start, end) of the text
_NUMBERED = re.compile(r"(.+):\d{1,4}", re.DOTALL)  # longer numbers are part of an entity id, as in GO:0008150
FACT_KEYS = ("head", "relation", "tail")
ROW_KEYS = (*FACT_KEYS, *TEXT_NAMES, "id", "name", "triples", "entities", "qualifiers", "title", "vertexSet")
INVERSE = "inverse of "  # prefix of the name of an inverse relation


class Triple(NamedTuple):
    """A (head, relation, tail) triple whose head occurs in the text."""

    head: str
    relation: str
    tail: str
    head_span: tuple[int, int] | None = None  # characters [start, end) of the text; None: search for the name
    head_id: str | None = None  # distinguishes entities with the same name; None: the name is the id
    tail_id: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns (head id, relation, tail id)."""
        return self.head_id or self.head, self.relation, self.tail_id or self.tail

    @property
    def entities(self) -> tuple[Entity, Entity]:
        return Entity(self.head_id or self.head, self.head), Entity(self.tail_id or self.tail, self.tail)

    @property
    def fact(self) -> tuple[str, str, str]:
        """Returns a key that a triple and its inverse share."""
        head, relation, tail = self.key
        return (tail, relation[len(INVERSE) :], head) if relation.startswith(INVERSE) else self.key


class GraphDocument(NamedTuple):
    """A text with its triples. Documents in the same `group` are in the same split."""

    id: str
    group: str
    text: str
    triples: tuple[Triple, ...] = ()
    entities: tuple[str, ...] = ()  # names of entities mentioned in the text, if known
    about: str | None = None  # id of the entity that the text describes, in a knowledge graph


class Entity(NamedTuple):
    """A node of the knowledge graph. Names need not be unique."""

    id: str
    name: str


class Fact(NamedTuple):
    """A triple of entity ids with optional qualifiers."""

    head: str
    relation: str
    tail: str
    qualifiers: tuple[tuple[str, str], ...] = ()


class EntityText(NamedTuple):
    """The description of an entity. If the source has no facts, it is used like any other document."""

    name: str
    document: GraphDocument


def _has_triple(row: Row) -> bool:
    """Returns whether the columns of a row are a single triple."""
    return any(_is_given(row.get(key)) for key in FACT_KEYS) and not _is_given(row.get("triples"))


def _is_fact(row: Row, columns: Columns) -> bool:
    texts = TEXT_NAMES if columns.text is None else (columns.text,)
    return _has_triple(row) and not any(_is_given(row.get(key)) for key in texts)


def _fact(row: SourceRow, columns: Columns) -> Fact:
    head, relation, tail = (_string(row, row.value, key) for key in FACT_KEYS)
    return Fact(head, relation, tail, _qualifiers(row))


def _is_entity(row: Row, columns: Columns) -> bool:
    return _is_given(row.get("id")) and not _has_triple(row) and not _is_given(row.get("triples"))


def _entity(row: SourceRow, columns: Columns) -> EntityText:
    document, name = _document(row, columns), row.value.get("name")
    return EntityText(_string(row, row.value, "name") if _is_given(name) else document.id, document)


def _document(row: SourceRow, columns: Columns) -> GraphDocument:
    value = row.value
    text = row.valid_text(row_text(value, columns.text, row.where), "text")
    name = row.identifier(value) or row.where.rpartition("/")[2]  # does not depend on the folder
    entities = tuple(row.valid_text(entity, "entities") for entity in _list(row, "entities"))
    triples = _triples(row, [value] if _has_triple(value) else value.get("triples"), text) if text.strip() else ()
    return text_document(name, text, triples, entities)


def text_document(
    name: str, text: str, triples: tuple[Triple, ...] = (), entities: tuple[str, ...] = ()
) -> GraphDocument:
    """Builds a document with id `name`. Ids that differ only in a number after the last colon share a group."""
    numbered = _NUMBERED.fullmatch(name)
    return GraphDocument(name, numbered[1] if numbered else name, text, triples, entities)


def _is_given(value: Any) -> bool:
    return value is not None and value != ""  # in CSV and Parquet files, rows have all columns, even empty ones


def _string(row: SourceRow, value: Row, key: str, where: str = "") -> str:
    """Returns a required, non-empty text."""
    text = value.get(key)
    if not isinstance(text, str) or not text.strip():
        raise row.error(f"{where}no {key}" if not _is_given(text) else f"{where}its {key} {text!r} is not a string")
    return row.valid_text(text, key)


def _list(row: SourceRow, key: str) -> list[Any]:
    items = row.value.get(key)
    if not _is_given(items):
        return []
    if not isinstance(items, list):
        raise row.error(f"its {key} value is of type {type(items).__name__} instead of a list")
    return items


def _triples(row: SourceRow, triples: Any, text: str) -> tuple[Triple, ...]:
    if not _is_given(triples):
        return ()
    if not isinstance(triples, list):
        raise row.error(f"its triples are of type {type(triples).__name__} instead of a list")
    return tuple(_triple(row, number, triple, text) for number, triple in enumerate(triples, 1))


def _triple(row: SourceRow, number: int, triple: Any, text: str) -> Triple:
    where = f"triple {number}: "
    if not isinstance(triple, dict):
        raise row.error(
            f"{where}it is of type {type(triple).__name__} instead of an object with head, relation and tail"
        )
    head, relation, tail = (_string(row, triple, key, where) for key in FACT_KEYS)
    span = _span(row, where, triple.get("head_span"), text)
    return Triple(head, relation, tail, span, row.identifier(triple, "head_id"), row.identifier(triple, "tail_id"))


def _span(row: SourceRow, where: str, span: Any, text: str) -> _Span | None:
    if span is None:
        return None
    if not isinstance(span, list) or len(span) != 2 or not all(type(end_point) is int for end_point in span):
        raise row.error(f"{where}its head_span is {span!r} instead of two integers")
    start, end = span
    if not 0 <= start < end <= len(text):
        raise row.error(
            f"{where}its head_span {span} is empty or exceeds the text of {counted(len(text), 'character')}"
        )
    return start, end


def _qualifiers(row: SourceRow) -> tuple[tuple[str, str], ...]:
    qualifiers = row.value.get("qualifiers")
    found = []
    for group in [qualifiers] if isinstance(qualifiers, dict) else _list(row, "qualifiers"):
        if not isinstance(group, dict):
            raise row.error(
                f"its qualifiers contain a value of type {type(group).__name__} instead of an object of keys and values"
            )
        for key, value in group.items():
            if _is_given(value):
                text = str(value) if type(value) in (int, float) else value
                found.append((row.valid_text(key, "qualifiers"), row.valid_text(text, f"qualifiers.{key}")))
    return tuple(found)


class _Mention(NamedTuple):
    span: _Span
    name: str


def _docred_document(row: SourceRow, columns: Columns) -> GraphDocument:
    """Parses a DocRED document (arXiv 1906.06127). An entity gets the name and span of its first mention."""
    title = _string(row, row.value, "title")
    text, spans = _joined_tokens(row)
    mentions = [_first_mention(row, number, vertex, spans) for number, vertex in enumerate(_list(row, "vertexSet"))]
    triples = [_label_triple(row, title, label, mentions) for label in _list(row, "labels")]
    names = dict.fromkeys(mention.name for mention in mentions)
    return GraphDocument(title, title, text, tuple(dict.fromkeys(triples)), tuple(names))


def _joined_tokens(row: SourceRow) -> tuple[str, list[list[_Span]]]:
    """Returns the tokens joined by spaces, and the span of each token in that text, by sentence."""
    tokens: list[str] = []
    spans: list[list[_Span]] = []
    start = 0
    for number, sentence in enumerate(_list(row, "sents")):
        if not isinstance(sentence, list):
            raise row.error(f"sentence {number} is of type {type(sentence).__name__} instead of a list of tokens")
        spans.append([])
        for token in sentence:
            tokens.append(row.valid_text(token, "sents"))
            spans[-1].append((start, start + len(token)))
            start += len(token) + 1
    return " ".join(tokens), spans


def _first_mention(row: SourceRow, number: int, vertex: Any, spans: list[list[_Span]]) -> _Mention:
    if not isinstance(vertex, list) or not vertex:
        raise row.error(f"entity {number} of its vertexSet is not a list of mentions")
    return min((_mention(row, number, mention, spans) for mention in vertex), key=lambda mention: mention.span)


def _mention(row: SourceRow, number: int, mention: Any, spans: list[list[_Span]]) -> _Mention:
    where = f"entity {number} of its vertexSet: "
    if not isinstance(mention, dict):
        raise row.error(f"{where}a mention is of type {type(mention).__name__} instead of an object")
    sentence, tokens = mention.get("sent_id"), mention.get("pos")
    if type(sentence) is not int or not 0 <= sentence < len(spans):
        raise row.error(f"{where}sent_id {sentence!r} is not one of the {counted(len(spans), 'sentence')}")
    if not isinstance(tokens, list) or len(tokens) != 2 or not all(type(place) is int for place in tokens):
        raise row.error(f"{where}pos is {tokens!r} instead of two integers")
    first, end = tokens
    if not 0 <= first < end <= len(spans[sentence]):
        raise row.error(
            f"{where}pos {tokens} is not within the {counted(len(spans[sentence]), 'token')} of its sentence"
        )
    span = spans[sentence][first][0], spans[sentence][end - 1][1]
    return _Mention(span, _string(row, mention, "name", where))


def _label_triple(row: SourceRow, title: str, label: Any, mentions: list[_Mention]) -> Triple:
    if not isinstance(label, dict):
        raise row.error(f"a label is of type {type(label).__name__} instead of an object")
    for end in ("h", "t"):
        if type(label.get(end)) is not int or not 0 <= label[end] < len(mentions):
            raise row.error(f"a label's {end} {label.get(end)!r} is not one of the {counted(len(mentions), 'entity')}")
    head, tail = label["h"], label["t"]
    return Triple(
        mentions[head].name,
        _string(row, label, "r", "a label: "),
        mentions[tail].name,
        mentions[head].span,
        f"{title}#{head}",
        f"{title}#{tail}",
    )


def check_triples(paths: Sequence[Path], columns: Columns) -> tuple[Columns, str | None]:
    """Raises ConfigError if it is unclear whether a table's lines are triples."""
    for path in paths:
        has_bare_triples(path, columns)
    return columns, None


def has_bare_triples(path: Path, columns: Columns) -> bool:
    """Returns whether a table has no header, and each line is a head, a relation and a tail.

    Raises ConfigError if this is unclear.
    """
    if not is_table(path) or not columns.has_header:
        return False
    first = FirstLine.of(path, ROW_KEYS if columns.text is None else (*ROW_KEYS, columns.text), columns)
    if first is None or len(first.values) != len(FACT_KEYS) or not first.looks_like_data:
        return False
    if _is_triple(path, first.values, columns):
        return True
    raise first.refusal(
        f"add a first line with the column names, which are {', '.join(FACT_KEYS)} if the lines are triples"
    )


def _is_triple(path: Path, first: tuple[str, ...], columns: Columns) -> bool:
    """Returns whether the first line is a triple rather than a header.

    It is a triple if its relation recurs in a later line, and its head or tail also recurs or cannot be a column name.
    """
    head, relation, tail = first
    has_relation, has_end = False, any(_is_no_name(end) for end in (head, tail))
    for line in table_lines(path, columns):
        if line != first and len(line) == len(first):
            has_relation = has_relation or line[1] == relation
            has_end = has_end or bool({head, tail} & {line[0], line[2]})
        if has_relation and has_end:
            return True
    return False


def _is_no_name(value: str) -> bool:
    """Returns whether a value cannot be a column name: it has several words, or does not start with a letter or _."""
    return len(value.split()) > 1 or not (value[:1].isalpha() or value[:1] == "_")


_TRIPLE = {"head": "Ada", "relation": "lived in", "tail": "London"}

GRAPHS: Forms[GraphDocument | EntityText | Fact] = Forms("a text or a triple", (
    Form(("vertexSet", "title", "sents", "labels"), _docred_document,
         {"title": "Ada", "sents": [["Ada", "lived", "in", "London"]], "labels": [{"h": 0, "r": "lived in", "t": 1}],
          "vertexSet": [[{"name": "Ada", "sent_id": 0, "pos": [0, 1]}],
                        [{"name": "London", "sent_id": 0, "pos": [3, 4]}]]},
         recognizes=lambda row, columns: row.get("vertexSet") is not None),
    Form(FACT_KEYS, _fact, {**_TRIPLE, "qualifiers": {"until": "1852"}}, ("qualifiers",), _is_fact),
    Form(("id", "text"), _entity, {"id": "Q7259", "name": "Ada", "text": "A mathematician."}, ("name",), _is_entity),
    Form(("text", "triples"), _document, {"text": "Ada lived in London.", "triples": [_TRIPLE], "entities": ["Ada"]},
         (*FACT_KEYS, "head_id", "tail_id", "head_span", "content", "entities", "id"), any_row),
), resolve=check_triples)  # fmt: skip

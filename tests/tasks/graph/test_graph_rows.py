"""Rows are read as texts with triples; invalid rows are rejected."""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.forms.graphs import GraphDocument, Triple
from sansgpu.tasks.graph.sources import open_graphs
from tests.tasks.graph.graph_files import GOOD, IS_A, TEXT, TREATS, Write, facts, read


def test_a_row_holds_a_text_with_its_triples(write: Write) -> None:
    more = {"head_id": "D3", "tail_id": 4, "head_span": [43, len(TEXT)]}
    row = {"id": "d17:0", "text": TEXT, "triples": [TREATS, {**IS_A, **more}]}
    triples = (
        Triple("Metformin", "treats", "diabetes", (0, 9)),
        Triple("type 2 diabetes", "isa", "diabetes", (43, len(TEXT)), "D3", "4"),
    )
    path = write({**row, "entities": ["Metformin", "diabetes"]})
    assert read(path) == [GraphDocument("d17:0", "d17", TEXT, triples, ("Metformin", "diabetes"))]


def test_rows_are_grouped_by_their_ids(write: Write) -> None:
    ids: list[Any] = ["d17:0", "d17:12", "d17", "d17:x", 17, "a:b:3", ":3", None]
    path = write(*({"id": name, "text": TEXT, "triples": []} for name in ids), {"text": TEXT})
    groups = [document.group for document in read(path)]
    assert groups == ["d17", "d17", "d17", "d17:x", "17", "a:b", ":3", "a.jsonl, line 8", "a.jsonl, line 9"]


def test_texts_without_triples_are_documents_too(write: Write) -> None:
    path = write({"text": TEXT, "triples": None}, {"id": "x", "text": "b"}, {"text": "", "triples": [TREATS]})
    assert [(d.id, d.text, d.triples) for d in read(path)] == [("a.jsonl, line 1", TEXT, ()), ("x", "b", ())]
    assert [d.text for d in read(write({"text": "a", "body": TEXT}), text_column="body")] == [TEXT]


def test_a_row_can_be_a_text_with_a_single_triple(write: Write) -> None:
    path = write({"id": "s1", "text": TEXT, **TREATS}, {"id": "s2", "content": TEXT, **IS_A})
    assert [d.triples for d in read(path)] == [
        (Triple("Metformin", "treats", "diabetes", (0, 9)),),
        (Triple("type 2 diabetes", "isa", "diabetes"),),
    ]


def test_a_plain_file_is_one_text(tmp_path: Path, write: Write) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("# Notes\n" * 200_000)
    write(GOOD)
    found = read(tmp_path)
    assert [(d.id, d.group, len(d.triples)) for d in found] == [("good", "good", 1), ("deep/b.md", "deep/b.md", 0)]
    assert found[1].text == "# Notes\n" * 200_000


ROWS = [{"id": "a", "text": TEXT, "triples": [TREATS, IS_A]}, {"id": "b", "text": "alone", "triples": []}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "saved"])
def test_all_forms_of_rows_give_the_same_documents(tmp_path: Path, write: Write, name: str) -> None:
    path = tmp_path / name
    match name:
        case "a.jsonl":
            write(*ROWS)
        case "a.json":
            write(ROWS, name=name)
        case "a.parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case "saved":
            datasets.Dataset.from_list(ROWS).save_to_disk(path)
    triples = (Triple("Metformin", "treats", "diabetes", (0, 9)), Triple("type 2 diabetes", "isa", "diabetes"))
    assert read(path) == [GraphDocument("a", "a", TEXT, triples), GraphDocument("b", "b", "alone")]


BAD_ROWS = [
    ([], "line 2: it is of type list instead of an object"),
    ('{"text"', "line 2 is not valid JSON"),
    ({"text": 3}, "line 2: column text contains a value of type int"),
    ({"text": TEXT, "id": [1]}, r"its id is \[1\] instead of a string or an integer"),
    ({"text": TEXT, "triples": {}}, "its triples are of type dict instead of a list"),
    ({"text": TEXT, "triples": [TREATS, 7]}, "triple 2: it is of type int instead of an object"),
    ({"text": TEXT, "entities": "Metformin"}, "its entities value is of type str instead of a list"),
    ({"text": TEXT, "entities": [3]}, "its entities contains 3"),
    ({"text": "half a pair \ud83c"}, "its text contains an unpaired surrogate"),
    ({"text": TEXT, "head": "Metformin"}, "triple 1: no relation"),
    ({"head": "Metformin", "relation": "treats"}, "no tail"),
    ({"head": "Metformin", "relation": " ", "tail": "x"}, "its relation ' ' is not a string"),
    ({**IS_A, "qualifiers": "since 1957"}, "its qualifiers value is of type str"),
    ({**IS_A, "qualifiers": ["since 1957"]}, "its qualifiers contain a value of type str"),
    ({**IS_A, "qualifiers": {"since": [1957]}}, r"its qualifiers.since contains \[1957\]"),
]


@pytest.mark.parametrize(("row", "sentence"), BAD_ROWS)
def test_a_bad_row_is_named_or_skipped(write: Write, row: object, sentence: str) -> None:
    path = write(GOOD, row, GOOD)
    with pytest.raises(ConfigError, match=sentence) as error:
        read(path)
    assert f"{path}, line 2" in str(error.value)
    assert str(error.value).endswith("or set data.on_bad_row to skip.")
    notes: list[str] = []
    data = DataConfig(dataset_name=str(path), on_bad_row="skip")
    assert [d.id for d in open_graphs(data, notes.append).train.documents()] == ["good", "good"]
    assert [note.partition("; the first: ")[0] for note in notes] == [f"{path}: bad rows skipped: 1 of 3"]
    assert "line 2" in notes[0]


@pytest.mark.parametrize("key", ["head", "relation", "tail"])
@pytest.mark.parametrize(("value", "sentence"), [(None, "no {}"), ("", "no {}"), (5, "its {} 5"), ("\ud83c", "its {}")])
def test_a_triple_without_a_part_is_bad(write: Write, key: str, value: object, sentence: str) -> None:
    path = write({"text": TEXT, "triples": [TREATS, {**IS_A, key: value}]})
    with pytest.raises(
        ConfigError, match=f"line 1: triple 2: {sentence.format(key)}|its {key} contains an unpaired surrogate"
    ):
        read(path)


NO_SPANS = [[0], [0, 9, 9], ["0", 9], [0, True], "09", 9, [5, 5], [9, 0], [-9, -1], [0, 1 + len(TEXT)]]


@pytest.mark.parametrize("span", NO_SPANS)
def test_a_span_that_is_not_in_the_text_is_bad(write: Write, span: object) -> None:
    with pytest.raises(ConfigError, match="line 1: triple 1: its head_span"):
        read(write({"text": TEXT, "triples": [{**TREATS, "head_span": span}]}))


KNOWLEDGE: list[dict[str, Any]] = [
    {"head": "Q1", "relation": "part of", "tail": "Q2"},
    {"id": "Q1", "text": "a river in Europe", "name": "Rhine"},
    {"head": "Q3", "relation": "flows through", "tail": "Q1"},
    {"head": "Q1", "relation": "flows into", "tail": "North Sea"},
    {"head": "Q1", "relation": "part of", "tail": "Q2"},
    {"id": "Q2", "text": "RHINE BASIN, all that flows into it", "name": "Rhine basin"},
    {"id": "Q4", "text": "has no facts"},
]


def test_facts_are_joined_to_the_texts_of_their_entities(write: Write) -> None:
    triples = (
        Triple("Rhine", "part of", "Rhine basin", (0, 5), "Q1", "Q2"),
        Triple("Rhine", "flows into", "North Sea", (0, 5), "Q1", "North Sea"),
    )
    assert read(write(*KNOWLEDGE)) == [
        GraphDocument("Q1", "Q1", "Rhine: a river in Europe", triples, about="Q1"),
        GraphDocument("Q3", "Q3", "Q3", (Triple("Q3", "flows through", "Rhine", (0, 2), "Q3", "Q1"),), about="Q3"),
    ]


def test_facts_are_also_added_to_their_tails(write: Write) -> None:
    found = {d.id: d for d in read(write(*KNOWLEDGE), inverse=True)}
    assert list(found) == ["Q1", "Q2", "Q3", "North Sea"]
    assert found["Q2"].text == "RHINE BASIN, all that flows into it"  # begins with the name in another case
    assert found["Q2"].triples == (Triple("Rhine basin", "inverse of part of", "Rhine", (0, 11), "Q2", "Q1"),)
    assert ("Rhine", "inverse of flows through", "Q3") in facts(found["Q1"])


@pytest.mark.parametrize(
    ("entity", "text"),
    [
        ({"text": "a river"}, "Q1: a river"),
        ({"text": "Rhine", "name": "Rhine"}, "Rhine"),
        ({"text": "Rhineland it is not", "name": "Rhine"}, "Rhine: Rhineland it is not"),
        ({"text": "rhine, a river", "name": "Rhine"}, "rhine, a river"),
        ({"text": "", "name": "Rhine"}, "Rhine"),
        ({"text": "C++ (a language)", "name": "C++"}, "C++ (a language)"),
    ],
)
def test_a_text_begins_with_its_name(write: Write, entity: dict[str, str], text: str) -> None:
    (document,) = read(write({"id": "Q1", **entity}, {"head": "Q1", "relation": "is", "tail": "x"}))
    (triple,) = document.triples
    assert document.text == text
    assert triple.head_span is not None
    assert text[slice(*triple.head_span)].lower() == triple.head.lower() == entity.get("name", "Q1").lower()


def test_a_fact_with_qualifiers_has_a_document_of_its_own(write: Write) -> None:
    fact = {"head": "Q1", "relation": "dammed", "tail": "Q2"}
    path = write(
        {**fact, "qualifiers": {"since": 1957, "by": "Q9"}},
        fact,
        {**fact, "qualifiers": [{"since": "1961"}, {"by": None}]},
        {"id": "Q9", "text": "a guild", "name": "the guild"},
    )
    assert [(d.id, d.group, d.text, facts(d)) for d in read(path)] == [
        ("Q1:0", "Q1", "Q1; since 1957; by the guild", [("Q1", "dammed", "Q2")]),
        ("Q1", "Q1", "Q1", [("Q1", "dammed", "Q2")]),
        ("Q1:1", "Q1", "Q1; since 1961", [("Q1", "dammed", "Q2")]),
    ]


def test_facts_and_texts_may_be_columns_of_one_table(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "name", "text", "head", "relation", "tail", "qualifiers"])
        writer.writeheader()
        writer.writerows(KNOWLEDGE)
    pyarrow.parquet.write_table(
        pyarrow.table({key: [row.get(key) for row in KNOWLEDGE] for key in writer.fieldnames}), tmp_path / "b.parquet"
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in KNOWLEDGE))
    of_csv, of_parquet, of_jsonl = (read(tmp_path / name) for name in ("a.csv", "b.parquet", "c.jsonl"))
    assert of_csv == of_parquet == of_jsonl


DOCRED: dict[str, Any] = {
    "title": "Ada Lovelace",
    "sents": [["Ada", "Lovelace", "wrote", "notes", "."], ["Lovelace", "knew", "Babbage", ",", "a", "Londoner", "."]],
    "vertexSet": [
        [{"name": "Lovelace", "pos": [0, 1], "sent_id": 1}, {"name": "Ada Lovelace", "pos": [0, 2], "sent_id": 0}],
        [{"name": "Babbage", "pos": [2, 3], "sent_id": 1}],
        [{"name": "London", "pos": [5, 6], "sent_id": 1}],
    ],
    "labels": [{"h": 1, "t": 2, "r": "P19"}, {"h": 0, "t": 1, "r": "P3342"}, {"h": 1, "t": 2, "r": "P19"}],
}


def test_a_document_of_docred_is_its_joined_tokens(write: Write) -> None:
    unlabeled = {key: value for key, value in DOCRED.items() if key != "labels"}
    document, other = read(write([DOCRED, unlabeled], name="dev.json"))
    text = "Ada Lovelace wrote notes . Lovelace knew Babbage , a Londoner ."
    assert document == GraphDocument(
        "Ada Lovelace",
        "Ada Lovelace",
        text,
        (
            Triple("Babbage", "P19", "London", (41, 48), "Ada Lovelace#1", "Ada Lovelace#2"),
            Triple("Ada Lovelace", "P3342", "Babbage", (0, 12), "Ada Lovelace#0", "Ada Lovelace#1"),
        ),
        ("Ada Lovelace", "Babbage", "London"),
    )
    assert [text[slice(*t.head_span)] for t in document.triples if t.head_span] == ["Babbage", "Ada Lovelace"]
    assert other == document._replace(triples=())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"title": None}, "no title"),
        ({"sents": "Ada"}, "its sents value is of type str"),
        ({"sents": ["Ada Lovelace", []]}, "sentence 0 is of type str"),
        ({"sents": [[1], []]}, "its sents contains 1"),
        ({"vertexSet": {}}, "its vertexSet value is of type dict"),
        ({"vertexSet": [[]]}, "entity 0 of its vertexSet is not a list of mentions"),
        ({"vertexSet": [["Ada"]]}, "entity 0 of its vertexSet: a mention is of type str"),
        ({"vertexSet": [[{"pos": [0, 1], "sent_id": 0}]]}, "entity 0 of its vertexSet: no name"),
        ({"vertexSet": [[{"name": "Ada", "pos": [0, 1], "sent_id": 2}]]}, "sent_id 2 is not one of the 2 sentences"),
        ({"vertexSet": [[{"name": "Ada", "pos": [4, 6], "sent_id": 0}]]}, r"pos \[4, 6\] is not within the 5 tokens"),
        ({"vertexSet": [[{"name": "Ada", "pos": 4, "sent_id": 0}]]}, "pos is 4 instead of two integers"),
        ({"labels": [3]}, "a label is of type int"),
        ({"labels": [{"h": 0, "t": 3, "r": "P19"}]}, "a label's t 3 is not one of the 3 entities"),
        ({"labels": [{"h": 0, "t": 1}]}, "a label: no r"),
    ],
)
def test_a_malformed_document_of_docred_is_a_bad_row(write: Write, change: dict[str, object], sentence: str) -> None:
    path = write([DOCRED, {**DOCRED, **change}], name="dev.json")
    with pytest.raises(ConfigError, match=f"row 2: .*{sentence}"):
        read(path)

"""Spans are learned as their tools mean them, in every form, and what is not used is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sansgpu.data.forms.tags import TAGGED
from sansgpu.data.rows import BadRowError, LeftOutError, SourceRow
from tests.data.forms.tagged_rows import DONE, LISTS, TEXT, TOKENS, learned, one, result, studio

FOUND = ["Maria PER", "Porto LOC"]
EMOJI = "😀 Call Maria in Porto."


def span(start: int, end: int, label: str = "PER", **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "label": label, **more}


OBJECTS = [span(0, 5), span(15, 20, "LOC")]
OFFSETS = [
    {"id": n, "label": o["label"], "start_offset": o["start"], "end_offset": o["end"]} for n, o in enumerate(OBJECTS)
]


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"text": TEXT, "spans": OBJECTS}, ""),
        ({"text": TEXT, "label": LISTS}, ""),  # doccano
        ({"id": 1, "text": TEXT, "label": LISTS, "Comments": []}, "'id' (1 row)"),
        ({"data": TEXT, "labels": LISTS}, ""),
        ({"text": TEXT, "entities": OFFSETS, "relations": [1]}, "'relations' (1 row), 'id in a span' (1)"),
        ({"text": TEXT, "entities": LISTS, "label": []}, ""),  # spaCy
        ([TEXT, {"entities": LISTS}], ""),
        ([TEXT, {"entities": LISTS, "cats": {"a": 1.0}}], "'cats' (1 row)"),
        ([TEXT, LISTS], ""),
        ({"classes": ["PER"], "annotations": [[TEXT, {"entities": LISTS}], None]}, ""),
        ({"text": TEXT, "ents": OBJECTS, "sents": [span(0, 21)], "tokens": TOKENS}, "'sents' (1 row)"),
        ({"text": TEXT, "spans": {"sc": OBJECTS}}, ""),
        ({"text": TEXT, "spans": OBJECTS, "tokens": TOKENS, "answer": "accept"}, ""),  # Prodigy
        ({"text": TEXT, "label": [{"start": 0, "end": 5, "text": "Maria", "labels": ["PER"]}, LISTS[1]]}, ""),
        ({"text": TEXT, "entities": {"start": [0, 15], "end": [5, 20], "label": ["PER", "LOC"]}}, ""),
        ({"text": TEXT, "entities": [{"entity": o["label"], "start": o["start"], "end": o["end"], "value": "x"}
                                     for o in OBJECTS]}, "'value in a span' (1 row)"),  # Rasa
        ({"content": TEXT, "annotation": [{"label": [o["label"]], "points": [
            {"start": o["start"], "end": o["end"] - 1, "text": text}]} for o, text in
            zip(OBJECTS, ("Maria", "Porto"), strict=True)], "extras": None}, ""),  # Dataturks
        ({"text": TEXT, "entities": [{"type": o["label"], "offset": o["start"], "length": 5} for o in OBJECTS]}, ""),
        ({"text": TEXT, "label": json.dumps(LISTS)}, ""),  # a cell of a table
        ({"text": TEXT, "label": "[(0, 5, 'PER'), (15, 20, 'LOC')]"}, ""),
        ({"tokenized_text": TEXT[:-1].split(), "ner": [[0, 0, "PER"], [3, 3, "LOC"]]}, ""),  # GLiNER
        ({"tokens": TEXT[:-1].split(), "ner": [[3, 3, "LOC", 0.5], [0, 0, "PER"]]},
         "'further values in a span' (1 row)"),
        ({"tokens": TEXT[:-1].split(), "entities": [{"type": "PER", "start": 0, "end": 1},
                                                    {"type": "LOC", "start": 3, "end": 4}], "orig_id": 7},
         "'orig_id' (1 row)"),  # SpERT
        ({"sentence": TEXT[:-1].split(), "ner": [{"index": [0], "type": "PER"}, {"index": [3], "type": "LOC"}]}, ""),
        ({"text": TEXT, "denotations": [{"id": "T1", "span": {"begin": o["start"], "end": o["end"]}, "obj": o["label"]}
                                        for o in OBJECTS]}, "'id in a span' (1 row)"),  # PubAnnotation
        ({"rasa_nlu_data": {"common_examples": [{"text": TEXT, "entities": OBJECTS}], "regex_features": [1]}},
         "'regex_features' (1 row)"),
        ({"examples": [{"content": TEXT, "annotations": [{"start": o["start"], "end": o["end"], "tag": o["label"]}
                                                         for o in OBJECTS]}]}, ""),  # LightTag
    ],
)  # fmt: skip
def test_spans_of_annotation_tools(row: Any, unused: str) -> None:
    spans, notes = one(row)
    assert spans == FOUND
    assert [note for note in notes if "not used" in note] == ([f"columns not used: {unused}"] if unused else [])


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        (studio(DONE), ""),
        ({"data": {"review": TEXT, "id": "x"}, "completions": [DONE]}, "'id in data' (1 row)"),
        (studio({**DONE, "was_cancelled": False}, {"result": []}), "'further annotations' (1 row)"),
        (studio({"result": []}, {**DONE, "ground_truth": True}), "'further annotations' (1 row)"),
        (studio({"result": [], "was_cancelled": True}, DONE), "'canceled annotations' (1 row)"),
        (studio(DONE, predictions=[{"result": []}], id=5), "'predictions' (1 row), 'id' (1)"),
        (studio({"result": [*DONE["result"], {"type": "relation"}, {"type": "choices", "value": {"choices": ["a"]}}]}),
         "'relation in an annotation' (1 row), 'choices in an annotation' (1)"),
        (studio({"result": [result(0, 5, "PER", labels=["PER", "ORG"]), DONE["result"][1]]}),
         "'further labels in a span' (1 row)"),
    ],
)  # fmt: skip
def test_an_annotation_of_label_studio(row: dict[str, Any], unused: str) -> None:
    assert one(row) == (FOUND, [f"columns not used: {unused}"] if unused else [])


def test_rows_that_annotators_left_out_are_counted() -> None:
    row = {"text": TEXT, "spans": OBJECTS}
    answers = ["accept", "reject", "ignore", "reject"]
    spans, notes = learned([*({**row, "answer": answer} for answer in answers), {"text": "x", "answer": "accept"}])
    assert spans == [FOUND, []]
    assert notes == ["left out: 2 rows with `answer: reject`, 1 row with `answer: ignore`"]
    canceled = studio({**DONE, "was_cancelled": True})
    assert learned([studio(DONE), studio(), canceled])[1][0] == "left out: 2 rows without an annotation"
    with pytest.raises(LeftOutError, match=r"line 1 is a row with `answer: reject`, which is left out"):
        TAGGED.read(SourceRow("rows.jsonl, line 1", {**row, "answer": "reject"}))


UTF16 = [
    {"text": EMOJI, "spans": [span(8, 13), span(17, 22, "LOC")]},
    {"text": "😀😀😀😀😀😀 Eva met Tom.", "spans": [span(13, 16), span(21, 24)]},
    {"text": "Tomás moved to Lyon.", "spans": [span(0, 5), span(15, 19, "LOC")]},
]
NAMES = [["Maria PER", "Porto LOC"], ["Eva PER", "Tom PER"], ["Tomás PER", "Lyon LOC"]]


def in_unit(rows: list[dict[str, Any]], encoding: str, width: int, inclusive: bool = False) -> list[dict[str, Any]]:
    """Converts the offsets of rows, which count UTF-16 units, to those that count the units of an encoding."""

    def converted(text: str, offset: int) -> int:
        return len(text.encode("utf-16-le")[: 2 * offset].decode("utf-16-le").encode(encoding)) // width

    return [
        {"text": row["text"], "spans": [
            {**one, "start": converted(row["text"], one["start"]),
             "end": converted(row["text"], one["end"]) - inclusive} for one in row["spans"]]}
        for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize(
    ("unit", "encoding", "width", "name"),
    [
        ("characters", "utf-32-le", 4, "characters"),
        ("utf16", "utf-16-le", 2, "UTF-16 units"),
        ("bytes", "utf-8", 1, "UTF-8 bytes"),
    ],
)
def test_what_offsets_count_is_recognized(unit: str, encoding: str, width: int, name: str, inclusive: bool) -> None:
    rows = in_unit(UTF16, encoding, width, inclusive)
    spans, notes = learned(rows)
    assert spans == NAMES
    last = ", and `end` is the last one" if inclusive else ""
    usual = unit == "characters" and not inclusive
    assert [note.partition(": so 6 of 6 fit their text or words")[0] for note in notes] == (
        [] if usual else [f"rows: the offsets of spans count {name}{last}"]
    )
    assert usual or notes[0].endswith("data.span_offsets sets it.")
    if not inclusive:
        assert learned(rows, span_offsets=unit) == (NAMES, [])


def test_few_texts_with_emojis_among_many_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sansgpu.data.forms.offsets.SAMPLE_TEXTS", 2)
    plain = {"text": TEXT, "spans": OBJECTS}
    spans, notes = learned([*[plain] * 30, *UTF16, plain])
    assert spans == [*[FOUND] * 30, *NAMES, FOUND]
    assert "count UTF-16 units" in notes[0]


def test_clusters_of_characters_and_line_ends_may_count_as_one() -> None:
    rows = [
        {"text": "De\u0301partement de Me\u0301decine a\u0300 Porto", "label": [[15, 23, "ORG"], [26, 31, "LOC"]]},
        {"text": "👩🏽‍🚒 Eva\r\nin Lyon", "label": [[2, 5, "PER"], [9, 13, "LOC"]]},
    ]
    spans, notes = learned(rows)
    assert spans == [["Me\u0301decine ORG", "Porto LOC"], ["Eva PER", "Lyon LOC"]]
    assert notes[0].startswith("rows: the offsets of spans count grapheme clusters: so 4 of 4 fit")
    assert learned(rows, span_offsets="graphemes") == (spans, [])
    with pytest.raises(BadRowError, match="span 0 from 0 to 14 is empty or not within the 13 grapheme clusters"):
        learned([{"text": rows[1]["text"], "label": [[0, 14, "X"]]}], span_offsets="graphemes")


def test_the_text_of_spans_decides_where_every_character_is_a_word() -> None:
    rows = [
        {"text": "我在東京。", "spans": [span(2, 3, "LOC", text="東京")]},
        {"text": "北京", "spans": [span(0, 1, "LOC")]},
    ]
    assert learned(rows)[0] == [["東京 LOC"], ["北京 LOC"]]
    assert learned([{**row, "spans": [{**row["spans"][0], "text": None}]} for row in rows])[0] == [
        ["東 LOC"],
        ["北 LOC"],
    ]


@pytest.mark.parametrize(
    ("rows", "spans"),
    [
        ([{"text": "Porto 😀", "spans": [span(0, 5)]}], [["Porto PER"]]),  # all units fit
        ([{"text": "unhappy man", "spans": [span(2, 7)]}], [["unhappy PER"]]),
        ([{"text": "Maria , Tom .", "spans": [span(0, 6), span(8, 12)]}], [["Maria PER", "Tom PER"]]),
    ],
)
def test_offsets_are_characters_if_nothing_says_otherwise(rows: list[dict[str, Any]], spans: list[list[str]]) -> None:
    found, notes = learned(rows)
    assert found == spans
    assert not any("offsets" in note for note in notes)


def test_a_configured_unit_is_used_and_its_errors_name_it() -> None:
    with pytest.raises(BadRowError, match=r"line 1: span 1 from 21 to 24 is empty or not within the 19 characters"):
        learned(UTF16[1:2], span_offsets="characters")
    with pytest.raises(BadRowError, match=r"span 0 from 1 to 8 is empty or not within the 26 UTF-8 bytes"):
        learned([{"text": EMOJI.replace("Call", "Calls"), "spans": [span(1, 8)]}], span_offsets="bytes")
    with pytest.raises(BadRowError, match="has the text 'Mario', but its UTF-16 units are 'Maria'"):
        learned([*UTF16, {"text": EMOJI, "spans": [span(8, 13, text="Mario")]}])


def test_the_outermost_of_nested_spans_is_learned() -> None:
    text = "University of Porto here"
    spans = [span(14, 19, "LOC"), span(0, 19, "ORG"), span(14, 24, "X"), span(0, 19, "ORG")]
    found, notes = one({"text": text, "spans": spans})
    assert found == ["University of Porto ORG"]
    assert notes == [
        "rows: 2 spans left out, because a longer one overlaps or has the same word; the outermost are learned."
    ]
    tokens = {"tokenized_text": text.split(), "ner": [[2, 2, "LOC"], [0, 2, "ORG"]]}
    assert one(tokens) == (found, [notes[0].replace("2 spans", "1 span")])
    assert one({"text": "unhappy", "spans": [span(0, 2, "A"), span(2, 7, "B")]})[0] == ["unhappy A"]


def test_further_keys_of_spans_are_named() -> None:
    row = {"text": TEXT, "spans": [span(0, 5, kind="x", score=0.5), span(15, 20, "LOC", kind="y")]}
    assert learned([row, row])[1] == ["columns not used: 'kind in a span' (2 rows), 'score in a span' (2)"]


def test_names_of_columns_of_spans_may_have_capitals() -> None:
    for row in ({"Text": TEXT, "Spans": OBJECTS}, {"Content": TEXT, "Entities": LISTS}, {"TEXT": TEXT, "LABEL": LISTS}):
        assert one(row) == (FOUND, [])

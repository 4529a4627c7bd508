"""Typed rows are shown as parts in which the targets are marked, and written in a form that reads to equal rows."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sansgpu.data.forms.form import USUAL, Form
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.preview.canonical import canonical_row, same_content
from sansgpu.data.preview.example import ExamplePart, learned_length, text_in
from sansgpu.data.preview.facts import SplitFacts, length_bins, repetition, scripts_of
from sansgpu.data.preview.look import DataLook
from sansgpu.data.preview.row_types import parts_of
from sansgpu.data.rows import SourceRow
from sansgpu.data.tables import Columns
from sansgpu.events.progress import ignore_progress
from sansgpu.jobs.data import DataRequest, look
from sansgpu.views.data_look import look_lines

WHERE = "rows.jsonl, line 1"


def forms() -> Iterator[Any]:
    for kind, found in FORMS.items():
        for form in found.forms:
            yield pytest.param(kind, form, id=f"{kind}: {form.name}")


def singles(kind: str, row: dict[str, Any]) -> list[SourceRow]:
    return list(FORMS[kind].single_rows([SourceRow(WHERE, json.loads(json.dumps(row)))]))


@pytest.mark.parametrize(("kind", "form"), [*forms()])
def test_a_row_of_every_form_is_shown_and_written(kind: str, form: Form[Any]) -> None:
    for row in singles(kind, dict(form.example)):
        typed = FORMS[kind].read(row)
        parts = parts_of(typed)
        assert all(part.name and part.segments for part in parts)
        assert text_in(parts).strip()
        written = json.loads(json.dumps(canonical_row(FORMS[kind], row, typed)))
        assert same_content(FORMS[kind].read(SourceRow(WHERE, written)), typed)


HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
MENTION = {"name": "A", "sent_id": 0, "pos": [0, 1]}
OWN: list[tuple[str, dict[str, Any], set[str]]] = [
    ("conversations", {"conversations": [HUMAN, GPT]}, {"messages"}),
    ("conversations", {"instruction": "a", "input": "b", "output": "c"}, {"instruction", "input", "output"}),
    ("conversations", {"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, {"prompt", "completion"}),
    ("conversations", {"prompt": "a", "completion": "b"}, {"prompt", "completion"}),
    ("conversations", {"text": "all of it", "url": "x"}, {"text"}),
    ("preferences", {"chosen": "Q: a\nA: b", "rejected": "Q: a\nA: c"}, {"prompt", "chosen", "rejected"}),
    ("labeled texts", {"content": "a b", "labels": ["x", "y"]}, {"text", "label"}),
    ("text groups", {"anchor": "a", "positive": "b", "negative": ["c", "d"]}, {"anchor", "positive", "negative"}),
    ("text groups", {"sentence1": "a", "sentence2": "b", "similarity": 1}, {"text1", "text2", "score"}),
    ("tagged texts", {"tokens": ["a.b", "c"], "ner_tags": ["B-X", "O"]}, {"tokens", "tags"}),
    ("tagged texts", {"tokens": ["Ada", "met", "Tom"], "tags": ["B-X", "O", "B-X"]}, {"text", "spans"}),
    ("graphs", {"title": "A", "sents": [["A", "b"]], "labels": [{"h": 0, "r": "is", "t": 0}], "vertexSet": [[MENTION]]},
     {"text", "triples", "entities", "id"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given", "columns"), OWN, ids=range(len(OWN)))
def test_the_written_form_is_one_for_each_kind_of_rows(kind: str, given: dict[str, Any], columns: set[str]) -> None:
    (row,) = singles(kind, given)
    typed = FORMS[kind].read(row)
    written = canonical_row(FORMS[kind], row, typed)
    assert same_content(FORMS[kind].read(SourceRow(WHERE, written)), typed)
    assert {*written} == columns


def marked(parts: tuple[ExamplePart, ...]) -> list[tuple[str, str, str]]:
    return [(part.name, one.text, one.label) for part in parts for one in part.segments if one.learned]


def test_targets_are_marked() -> None:
    cases: list[tuple[str, dict[str, Any], list[tuple[str, str, str]]]] = [
        ("conversations", {"prompt": "a", "completion": "b"}, [("assistant", "b", "")]),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c"}, [("chosen", "b", ""), ("rejected", "c", "")]),
        ("preferences", {"prompt": "a", "completion": "b", "label": False}, [("bad answer", "b", "")]),
        ("tagged texts", {"tokens": ["Ada", "B", "saw", "it"], "tags": ["B-PER", "I-PER", "O", "B-X"]},
         [("text", "Ada B", "PER"), ("text", "it", "X")]),
        ("questions", {"question": "q", "context": "a b c", "answers": {"text": ["b"], "answer_start": [2]}},
         [("context", "b", "answer")]),
        ("labeled texts", {"text": "a", "label": ["x", "y"]}, [("label", "x, y", "")]),
        ("text groups", {"text1": "a", "text2": "b", "score": 0.5}, [("score", "0.5", "")]),
        ("texts", {"text": "a b"}, [("text", "a b", "")]),
    ]  # fmt: skip
    for kind, row, expected in cases:
        assert marked(parts_of(FORMS[kind].read(singles(kind, row)[0]))) == expected
    later = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                        {"role": "user", "content": "c"}], "completion": "d"}  # fmt: skip
    parts = parts_of(FORMS["conversations"].read(singles("conversations", later)[0]))
    assert marked(parts) == [("assistant", "d", "")]
    assert learned_length(parts) == 1


def facts_of(kind: str, rows: list[dict[str, Any]], columns: Columns = USUAL) -> SplitFacts:
    facts = SplitFacts()
    list(facts.read((SourceRow(f"line {n}", row) for n, row in enumerate(rows, 1)), FORMS[kind], columns, None))
    return facts


def test_rows_are_counted_by_form_columns_and_reasons() -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a b", "label": "x", "id": 1},
        {"text": "c d", "label": "y", "note": None},
        {"text": "e", "label": None},
        {"text": "", "label": "x"},
        {"text": "f", "label": ""},
    ]
    found = facts_of("labeled texts", rows).look("rows", "training", 1.0)
    assert (found.rows, found.usable, dict(found.used), dict(found.not_used)) == (
        5,
        2,
        {"text": 2, "label": 2},
        {"id": 1},
    )
    assert [(one.rows, one.first) for one in found.left_out] == [
        (2, "line 3: it has no label; fix or remove the row."),
        (1, "line 4: its text is empty; fix or remove the row."),
    ]


def test_the_longest_row_and_even_samples_are_kept() -> None:
    rows = [{"text": "a " * (1 + (number == 4321)), "label": "x"} for number in range(10_000)]
    facts = facts_of("labeled texts", rows)
    assert facts.longest is not None
    assert facts.longest.number == 4322
    numbers = np.array([one.number for one in facts.sample])
    assert 2000 <= len(numbers) <= 4000
    assert {*np.diff(numbers)} == {4}


def test_repetitions_within_and_between_the_parts_are_counted() -> None:
    words = [f"word{number}" for number in range(60)]
    long, changed = " ".join(words), " ".join([*words[:-1], "other"])
    train = facts_of("texts", [{"text": text} for text in (long, changed, "a b c", "a b c", "x y")])
    held = facts_of("texts", [{"text": text} for text in ("a b c", f"{long} end", "x y z", "new text here")])
    found = repetition(train, held)
    assert (found.equal, found.nearly, found.validation_equal, found.validation_nearly) == (1, 1, 1, 1)
    alone = repetition(train, None)
    assert (alone.equal, alone.nearly, alone.validation_equal) == (1, 1, None)


def test_the_same_text_with_different_labels_is_known() -> None:
    facts = facts_of("labeled texts", [{"text": "a", "label": label} for label in "xyx"])
    assert [len(labels) for labels in facts.labels_of_text.values()] == [2]


def test_lengths_are_counted_in_bins_and_letters_by_script() -> None:
    assert length_bins(np.array([1, 3, 5, 6, 120])) == (
        (1, 1),
        (2, 0),
        (5, 2),
        (10, 1),
        (20, 0),
        (50, 0),
        (100, 0),
        (200, 1),
    )
    assert length_bins(np.array([0, 0])) == ((1, 2),)
    shares = scripts_of(facts_of("texts", [{"text": "abc где 12"}, {"text": "漢字"}]).sample)
    assert shares == {"Latin": 3 / 8, "Cyrillic": 3 / 8, "CJK": 2 / 8}


def test_looking_needs_no_torch(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\na b,x\nc d,y\n")
    program = (
        f"import sys; from sansgpu.cli import run; code = run(['data', {str(rows)!r}]);"
        "print(code, {'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "0 set()"


def look_at(path: Path, text: str) -> DataLook:
    path.write_text(text)
    return look(DataRequest(str(path)), ignore_progress)


def test_rows_of_files_are_counted_before_those_that_hold_several_are_split(tmp_path: Path) -> None:
    lines = '{"query": "a", "pos": ["b", "c"], "neg": ["d"]}\n{"query": "e", "pos": ["f"], "neg": ["g"]}\n'
    found = look_at(tmp_path / "rows.jsonl", lines)
    assert (found.splits[0].rows, found.splits[0].source_rows) == (3, 2)
    assert any(line.endswith(", made of 2 rows of its files") for line in look_lines(found))
    found = look_at(tmp_path / "texts.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    assert not any("made of" in line for line in look_lines(found))


def test_a_row_without_a_text_is_left_out_and_not_written(tmp_path: Path) -> None:
    path, written = tmp_path / "rows.csv", tmp_path / "written.jsonl"
    path.write_text("id,text\n1,one\n2,\n3,three\n")
    found = look(DataRequest(str(path), "pretrain", write=written), ignore_progress).splits[0]
    assert (found.rows, found.usable, found.bad_rows) == (3, 2, 0)
    assert written.read_text() == '{"text": "one"}\n{"text": "three"}\n'


@pytest.mark.parametrize(
    "row", ['{{"text": "a {n}", "label": "{label}"}}', '{{"text": "Ada {n}", "spans": [[0, 3, "{label}"]]}}']
)
def test_labels_that_differ_only_in_case_are_named(row: str, tmp_path: Path) -> None:
    labels = ["Spam", "spam", "ham", "Spam"]
    lines = "".join(row.format(n=n, label=label) + "\n" for n, label in enumerate(labels))
    found = look_at(tmp_path / "rows.jsonl", lines).labels
    assert found is not None
    assert "'Spam', 'spam'; make them equal" in str(found.note)

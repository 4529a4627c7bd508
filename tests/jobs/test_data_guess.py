"""`sansgpu data` guesses the task from the columns, in spite of some bad rows, and says what other settings allow."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.jobs.data import DataRequest, look
from tests.processes import Captured, write_rows

ASKED, GIVEN = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}
ROWS = 20


def looked(path: Path, **options: Any) -> Any:
    return look(DataRequest(str(path), **options), lambda *_: None)


def table(path: Path, header: str, rows: Sequence[Sequence[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return path


# A task, a good row in which {n} becomes the number of the row, and a bad row.
WITH_BAD_ROWS: list[tuple[str, dict[str, Any], Any]] = [
    ("sft", {"question": "What is {n}?", "answer": "It is {n}."}, {"question": "What is left?", "answer": ""}),
    ("sft", {"question": "What is {n}?", "answer": "It is {n}."}, {"question": "What is left?"}),
    ("sft", {"prompt": "a {n}", "completion": "b {n}"}, {"prompt": "a"}),
    ("sft", {"messages": [ASKED, GIVEN], "id": "{n}"}, {"messages": [ASKED]}),
    ("grpo", {"messages": [ASKED], "answer": "{n}"}, {"messages": [], "answer": "4"}),
    ("preference", {"prompt": "a {n}", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}),
    ("preference", {"prompt": "a {n}", "chosen": "b", "rejected": "c"},
     {"prompt": "a", "chosen": "b", "rejected": "b"}),
    ("classify", {"text": "a {n}", "label": "x"}, {"text": "a"}),
    ("classify", {"text": "a {n}", "label": "x"}, '{"text": "a", '),
    ("classify", {"Text": "a {n}", "Sentiment": "good"}, {"Text": "a", "Sentiment": ""}),
    ("embed", {"query": "a {n}", "pos": ["b"], "neg": ["c"], "scores": [1], "prompt": "p"}, {"query": "a", "pos": []}),
    ("embed", {"anchor": "a {n}", "positive": "b"}, {"anchor": "a"}),
    ("tokens", {"tokens": ["a", "{n}"], "ner_tags": ["O", "B-X"]}, {"tokens": ["a"], "ner_tags": []}),
    ("qa", {"question": "q", "context": "a {n}", "answers": {"text": ["a"], "answer_start": [0]}},
     {"question": "q", "context": "a"}),
    ("qa", {"question": "q {n}", "context": "It is in room {n}.", "answer": "room {n}"},
     {"question": "q", "context": "Nothing.", "answer": "the moon"}),
    ("graph", {"head": "a{n}", "relation": "b", "tail": "c"}, {"head": "a", "relation": "b"}),
    ("pretrain", {"text": "a b {n}", "url": "http://{n}", "language": "en"}, {"text": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("task", "good", "bad"), WITH_BAD_ROWS, ids=range(len(WITH_BAD_ROWS)))
@pytest.mark.parametrize("rows", [3, ROWS])
def test_a_bad_row_does_not_change_the_task(
    task: str, good: dict[str, Any], bad: Any, rows: int, tmp_path: Path
) -> None:
    numbered = [json.loads(json.dumps(good).replace("{n}", str(n))) for n in range(1, rows)]
    for seed in range(2):
        given = [*numbered, bad]
        random.Random(seed).shuffle(given)
        found = looked(write_rows(tmp_path / f"{seed}.jsonl", given))
        split = found.splits[0]
        assert (found.task, split.usable, split.rows) == (task, rows - 1, rows)


def test_most_rows_of_a_small_file_may_be_bad(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q2", "chosen": "same", "rejected": "same"},
        {"prompt": "q3", "chosen": "x"},
    ]
    found = looked(write_rows(tmp_path / "rows.jsonl", rows))
    assert (found.task, found.splits[0].usable) == ("preference", 1)
    assert "line 2 has identical chosen and rejected" in found.splits[0].left_out[0].first
    more = write_rows(tmp_path / "more.jsonl", [rows[0], *[rows[1]] * 5])
    with pytest.raises(ConfigError, match="fits task preference best, but only 1 of the first 6 rows are valid for it"):
        looked(more)


def test_texts_without_an_annotation_do_not_count(tmp_path: Path) -> None:
    value = {"start": 0, "end": 3, "text": "Ada", "labels": ["PER"]}
    result = [{"value": value, "from_name": "label", "to_name": "text", "type": "labels"}]
    annotations: list[Any] = [[{"result": result}], [{"was_cancelled": True, "result": []}], *([],) * 3]
    items = [{"id": n, "data": {"text": f"Ada {n}"}, "annotations": one} for n, one in enumerate(annotations)]
    (tmp_path / "items.json").write_text(json.dumps(items))
    found = looked(tmp_path / "items.json")
    assert (found.task, found.splits[0].usable, found.splits[0].bad_rows) == ("tokens", 1, 0)


TABLES: list[tuple[str, str, list[object]]] = [
    ("classify", "Text,Sentiment", ["pos", "neg"]),
    ("classify", "text,rating", [1, 2, 5, 4]),
    ("classify", "text,score", [0.5, 1.25, 3.5, 2.75, 9.5, 7.25, 3.75]),
    ("classify", "text,tags", ["red", "blue", "red;blue"]),
    ("classify", "Text,is_spam", [0, 1]),
    ("classify", "Kommentar,Kategorie", ["Sport", "Politik", "Kultur"]),
    ("pretrain", "text,source", ["web", "books"]),
    ("pretrain", "text,remark", [f"A text, remark {n}." for n in range(12)]),
    ("pretrain", "text,number", [*range(12)]),
    ("sft", "question,answer", ["yes", "no"]),
]


@pytest.mark.parametrize(("task", "header", "values"), TABLES, ids=[header for _, header, _ in TABLES])
def test_a_column_with_few_values_or_scores_is_a_label(
    task: str, header: str, values: list[object], tmp_path: Path
) -> None:
    rows = [[f"Some words about {n}", values[n % len(values)]] for n in range(12)]
    found = looked(table(tmp_path / "rows.csv", header, rows))
    column = header.split(",")[1]
    assert (found.task, found.splits[0].usable) == (task, 12)
    assert (f"label = column {column} (data.label_column)" in " ".join(found.notes)) == (task == "classify")
    if column == "source":
        assert found.notes == ("if the rows are texts with labels, add --task classify --set data.label_column=source",)


def test_classification_reads_the_only_column_beside_the_text(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.csv", "text,number", [[f"Some words {n}", n] for n in range(6)])
    found = looked(path, task="classify")
    assert (found.splits[0].usable, found.notes) == (6, (f"{path}: label = column number (data.label_column)",))
    path = table(tmp_path / "pairs.csv", "text,text_pair,number", [[f"Some {n}", f"more {n}", n] for n in range(6)])
    assert looked(path, task="classify").splits[0].forms == {"text + text_pair + number": 6}
    path = table(tmp_path / "more.csv", "text,number,place", [[f"Some words {n}", n, f"p{n}"] for n in range(6)])
    with pytest.raises(ConfigError, match="has no column label or labels, only text, number, place"):
        looked(path, task="classify")


def test_the_settings_for_other_tasks_are_named(tmp_path: Path) -> None:
    path = table(
        tmp_path / "a.csv", "Title,Body,Category", [[f"T {n}", f"A text {n}", "abc"[n % 3]] for n in range(12)]
    )
    found = looked(path)
    options = "--task classify --set data.text_column=Body --set data.label_column=Category"
    assert (found.task, found.notes) == ("embed", (f"if the rows are texts with labels, add {options}",))
    overrides = tuple(option for option in options.split() if option.startswith("data."))
    found = looked(path, task="classify", overrides=overrides)
    assert (found.splits[0].usable, [name for name, _ in found.labels.mapping]) == (12, ["a", "b", "c"])
    path = table(tmp_path / "b.csv", "Query,Document,Relevance", [[f"q {n}", f"d {n}", n % 3] for n in range(12)])
    (note,) = looked(path).notes
    assert note.startswith("the columns fit task embed better, but no row is valid for it: ")
    assert "set data.label_column to Relevance" in note


def test_questions_and_answers_with_unknown_names_are_to_be_renamed(tmp_path: Path) -> None:
    path = table(tmp_path / "faq.csv", "Frage,Antwort", [[f"Was ist {n}?", f"Es ist {n}."] for n in range(6)])
    with pytest.raises(ConfigError, match="rename Frage to prompt and Antwort to completion for task sft if they are"):
        looked(path)


def test_data_without_a_usable_row_are_an_error(tmp_path: Path, capsys: Captured) -> None:
    path = table(tmp_path / "faq.csv", "Frage,Antwort", [[f"Was ist {n}?", f"Es ist {n}."] for n in range(12)])
    assert cli(["data", str(path), "--task", "sft"]) == 2
    error = capsys.readouterr().err
    assert f"sansgpu: {path}: no row is usable for task sft: {path}, row 1: it has Frage, Antwort, but needs" in error
    assert "on_bad_row" not in error

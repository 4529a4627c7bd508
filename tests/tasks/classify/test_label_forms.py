"""Labels are read as files have them: several in a cell, vectors and 0/1 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.tables import Columns
from sansgpu.tasks.classify.data import balanced_weights
from sansgpu.tasks.classify.labels import Labels
from sansgpu.tasks.classify.objective import ClassifyObjective
from tests.processes import options, write_rows
from tests.tasks.classify.label_tables import BERT, labeled, prepared, said, table
from tests.tasks.fine_tuned import TINY, Captured


@pytest.mark.parametrize("header", [("Text", "Label"), ("TEXT", "LABELS"), (" text", " Label ")])
def test_usual_names_of_columns_may_have_capitals(header: tuple[str, str]) -> None:
    row = {"Title": "b", header[0]: "a", header[1]: "x"}
    found = FORMS["labeled texts"].read(SourceRow("row 1", row), Columns(), RowReport("fail"))
    assert (found.text, found.label) == ("a", "x")
    exact = {"Label": "y", "Text": "b", "text": "a", "label": "x"}
    found = FORMS["labeled texts"].read(SourceRow("row 1", exact), Columns(), RowReport("fail"))
    assert (found.text, found.label) == ("a", "x")


# Several labels

SEVERAL: dict[str, tuple[list[Any], list[str], list[list[int]]]] = {
    "Python": (["['a', 'b']", "['c']", "[]"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "JSON": (['["a", "b"]', '["c"]', "[]"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "numpy": (["['a' 'b']", "['c']", "[]"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "both quotes": (["""["women's" 'men']""", "['men']", "[]"], ["men", "women's"], [[1, 1], [1, 0], [0, 0]]),
    "arrays": (["array(['a', 'b'], dtype=object)", "array(['b'], dtype='<U1')"], ["a", "b"], [[1, 1], [0, 1]]),
    "numpy's numbers": (["[ 2 27]", "[3]", "[27]"], ["2", "3", "27"], [[1, 0, 1], [0, 1, 0], [0, 0, 1]]),
    "without quotes": (["[a, b]", "[c]", "[]"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "bars": (["a|b", "c", "b|c"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 1, 1]]),
    "semicolons": (["a; b", "c", "b;c"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 1, 1]]),
    "commas": (["a, b", "c", "b, c"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 1, 1]]),
    "ids between commas": (["27", "2,27", "3"], ["2", "3", "27"], [[0, 0, 1], [1, 0, 1], [0, 1, 0]]),
    "vectors": (["[1, 0, 0]", "[0, 1, 1]", "[0 0 0]"], ["0", "1", "2"], [[1, 0, 0], [0, 1, 1], [0, 0, 0]]),
    "bits": (["1 0 0", "0 1 1", "0 0 0"], ["0", "1", "2"], [[1, 0, 0], [0, 1, 1], [0, 0, 0]]),
    "sets": (["{'a'}", "{'b'}", "set()"], ["a", "b"], [[1, 0], [0, 1], [0, 0]]),
    "two bars": (["a||b", "c", "b||c"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 1, 1]]),
    "bars at the end": (["a|b|", "c|", "b|c|"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 1, 1]]),
    "lines": (["a\nb", "c", "b\nc"], ["a", "b", "c"], [[1, 1, 0], [0, 0, 1], [0, 1, 1]]),
    "lists": ([["a", "b"], [], ["b"]], ["a", "b"], [[1, 1], [0, 0], [0, 1]]),
    "lists of ids": ([[0, 2], [1], [2]], ["0", "1", "2"], [[1, 0, 1], [0, 1, 0], [0, 0, 1]]),
    "lists of bits": ([[1, 0, 1], [0.0, 1.0, 0.0], [0, 0, 0]], ["0", "1", "2"], [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
    "lists of two bits": ([[True, False], [False, False]], ["0", "1"], [[1, 0], [0, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_several_labels_in_a_cell_are_recognized(tmp_path: Path, name: str) -> None:
    labels, names, targets = SEVERAL[name]
    rows = [{"text": f"text {n}", "labels": value} for n, value in enumerate(labels)]
    data, corpus = prepared(write_rows(tmp_path / "rows.jsonl", rows))
    assert (data.label_kind, data.labels, corpus.train.targets.tolist()) == ("multiple", names, targets)
    assert "data.label_kind multiple" in said(corpus)


SINGLE = {
    "categories with commas": ["Arts, Crafts & Sewing", "Home, Garden", "Toys", "Home"],
    "places": ["Springfield, IL", "Salem, MA", "Boston, MA", "Peoria, IL"],
    "names": ["Smith, John", "Smith, Jane", "Doe, John"],
    "sentences": ["I agree; fully", "I do not agree", "no answer", "other"],
    "one with a bar": ["a|b", "c", "d"],
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_separator_within_names_does_not_split_them(tmp_path: Path, name: str) -> None:
    data, _ = prepared(labeled(tmp_path, SINGLE[name]))  # type: ignore[arg-type]
    assert (data.label_kind, data.labels) == ("single", sorted(SINGLE[name]))


def test_the_separator_and_the_kind_can_be_set(tmp_path: Path) -> None:
    path = labeled(tmp_path, ["a/b", "c/a", "c"])
    assert prepared(path)[0].label_kind == "single"
    data, corpus = prepared(path, data__label_separator="/")
    assert (data.label_kind, data.labels) == ("multiple", ["a", "b", "c"])
    assert prepared(labeled(tmp_path, ["a|b", "b|c", "c"]), data__label_kind="single")[0].labels == ["a|b", "b|c", "c"]
    data, _ = prepared(labeled(tmp_path, ["x, y", "z, w"]), data__label_kind="multiple")
    assert data.labels == ["w", "x", "y", "z"]
    _, corpus = prepared(labeled(tmp_path, ["Home, Garden", "Toys", "Home", "Toys, Games"]))
    assert "labels such as 'Home, Garden' are read as one label" in said(corpus)


def test_one_odd_vector_of_few_does_not_change_the_others(tmp_path: Path) -> None:
    path = labeled(tmp_path, ["[1, 0, 0]", "[0, 1, 1]", "[0, 1]", "[0 0 1]"])
    with pytest.raises(ConfigError, match=r"row 3: its label is '.*' with 2 values, but others are vectors of 3"):
        prepared(path)
    assert prepared(path, data__on_bad_row="skip")[0].labels == ["0", "1", "2"]


def test_a_column_that_identifies_rows_is_no_text(tmp_path: Path) -> None:
    for name in ("id", "_id", "idx", "uuid"):
        path = table(tmp_path / "rows.csv", [[name, "label"], ["a1", "x"], ["b2", "y"]])
        with pytest.raises(ConfigError, match=f"has the columns {name}, label, of which none looks like a text; set"):
            prepared(path)
    assert prepared(path, data__text_column="uuid")[0].labels == ["x", "y"]


def test_vectors_of_another_length_and_probabilities_are_bad_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"a {n}", "label": [n % 2, 1, 0]} for n in range(20)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, {"text": "b", "label": [1, 0]}])
    with pytest.raises(
        ConfigError, match=r"line 21: its label is \[1, 0\] with 2 values, but others are vectors of 3 zeros and ones"
    ):
        prepared(path)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert prepared(path, data__labels=["x", "y", "z"])[0].labels == ["x", "y", "z"]
    with pytest.raises(ConfigError, match=r"vectors of 3 zeros and ones, but data\.labels has 2 names"):
        prepared(path, data__labels=["x", "y"])
    with pytest.raises(ConfigError, match=r"row 2: its label is .*, which begins like a list, but is none"):
        prepared(labeled(tmp_path, ["['a']", "['a', 'b", "['b']"]))
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"a {n}", "label": [0.25, 0.75]} for n in range(3)])
    with pytest.raises(ConfigError, match=r"lists the number 0\.25, but probabilities of labels cannot be learned"):
        prepared(path)


# Columns of zeros and ones


def test_a_column_for_each_label_is_recognized_or_set(tmp_path: Path) -> None:
    header = ["id", "comment_text", "toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate"]
    rows = [[f"{n:016x}", f"comment {n}", int(n < 3), 0, int(n == 1), 0, int(n == 2), 0] for n in range(8)]
    path = table(tmp_path / "train.csv", [header, *rows])
    data, corpus = prepared(path)
    assert (data.label_kind, data.labels, data.label_column) == ("multiple", header[2:], header[2:])
    assert corpus.train.targets[1].tolist() == [1, 0, 1, 0, 0, 0]
    assert "have only 0 and 1, so each is a label" in said(corpus)
    assert "columns not used: 'id' (8 rows)" in said(corpus)
    data, corpus = prepared(path, data__label_column=["threat", "toxic"])
    assert (data.labels, corpus.train.targets[0].tolist()) == (["threat", "toxic"], [0, 1])
    assert prepared(path, data__label_column="*toxic")[0].labels == ["toxic", "severe_toxic"]
    assert prepared(path, data__label_column=["threat", "in*"])[0].labels == ["threat", "insult"]


def test_columns_of_flags_are_no_labels_beside_a_label(tmp_path: Path) -> None:
    rows = [["text", "category", "verified", "recent"], *([f"a {n}", "xy"[n % 2], n % 2, 1] for n in range(6))]
    data, corpus = prepared(table(tmp_path / "rows.csv", rows))
    assert (data.labels, data.label_column) == (["x", "y"], "category")
    assert "label = column category" in said(corpus)
    assert "columns not used: 'verified' (6 rows), 'recent' (6)" in said(corpus)


BAD_FLAGS = {"2": "its threat is '2' instead of 0 or 1", "": "because its threat is empty", "-1": "its threat is -1"}


@pytest.mark.parametrize("value", BAD_FLAGS)
def test_a_value_that_is_no_flag_is_a_bad_row(tmp_path: Path, value: str) -> None:
    rows = [["text", "toxic", "threat"], ["a", "0", "1"], ["b", "1", value]]
    chosen = {"data__label_column": ["toxic", "threat"]} if value == "2" else {}
    with pytest.raises(ConfigError, match=f"row 2: .*{BAD_FLAGS[value]}"):
        prepared(table(tmp_path / "rows.csv", rows), **chosen)
    with pytest.raises(ConfigError, match="no column toxi, only text, toxic, threat"):
        prepared(tmp_path / "rows.csv", data__label_column=["toxi"])
    with pytest.raises(ConfigError, match=r"has no column tox_\*, only text, toxic, threat"):
        prepared(tmp_path / "rows.csv", data__label_column="tox_*")


def test_columns_and_separators_are_read_in_evaluations(tmp_path: Path, capsys: Captured) -> None:
    header = ["id", "comment_text", "toxic", "threat"]
    path = table(tmp_path / "train.csv", [header, *([f"e{n}", f"red {n}", n % 2, int(n < 2)] for n in range(8))])
    run = tmp_path / "run"
    chosen = {"data.dataset_name": path, "data.validation_name": path, "training.max_steps": 1}
    assert cli(["train", *options(TINY, BERT, chosen), "--output-dir", str(run)]) == 0
    cells = table(tmp_path / "cells.csv", [["text", "labels"], ["red 1", "toxic|threat"], ["red", "threat"]])
    lists = write_rows(tmp_path / "lists.jsonl", [{"text": "red 1", "labels": ["toxic"]}, {"text": "a", "labels": []}])
    vectors = write_rows(tmp_path / "bits.jsonl", [{"text": "a", "labels": [1, 0]}, {"text": "b", "labels": [0, 0]}])
    for target, data, count in ((run, path, 8), (run / "final", path, 8), (run / "final", cells, 2),
                                (run / "final", lists, 2), (run / "final", vectors, 2)):  # fmt: skip
        capsys.readouterr()
        assert cli(["eval", str(target), "--data", str(data), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["rows"], found["skipped"]) == (count, 0)
    assert cli(["predict", str(run / "final"), "--data", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [[*json.loads(line)["scores"]] for line in lines] == [["toxic", "threat"]] * 8


# Rows in the form of public data


def test_rows_in_the_form_of_public_data_need_no_setting(tmp_path: Path) -> None:
    intents = [{"text": f"question {n}", "label": n % 77} for n in range(231)]
    data, _ = prepared(write_rows(tmp_path / "banking77.jsonl", intents))
    assert (data.label_kind, len(data.labels)) == ("single", 77)
    rows = [["text", "category"], *([f"question {n}", f"intent_{n % 5}"] for n in range(10))]
    assert prepared(table(tmp_path / "banking.csv", rows))[0].labels == [f"intent_{n}" for n in range(5)]
    emotions = [{"text": f"remark {n}", "labels": [[27], [2, 14], [n % 28]][n % 3], "id": f"e{n}"} for n in range(60)]
    data, corpus = prepared(write_rows(tmp_path / "go.jsonl", emotions))
    assert data.label_kind == "multiple"
    assert corpus.train.targets[1].tolist() == [int(name in ("2", "14")) for name in data.labels]
    names = [f"emotion{n}" for n in range(28)]
    about = ["text", "id", "author", "rater_id", "created_utc", "example_very_unclear"]
    raw = [[f"remark {n}", f"e{n}", "someone", n % 2, 1.5e9 + n, "FALSE", *(int(n % 28 == i) for i in range(28))]
           for n in range(30)]  # fmt: skip
    data, corpus = prepared(table(tmp_path / "raw.csv", [[*about, *names], *raw]))
    assert (data.label_column, data.labels) == (names, names)
    assert corpus.train.targets.sum() == 30
    entailed = [{"premise": f"a {n}", "hypothesis": "b", "label": n % 3, "idx": n} for n in range(9)]
    _, corpus = prepared(write_rows(tmp_path / "nli.jsonl", entailed))
    assert len(corpus.train.tokens[0]) == len(corpus.tokenizer("a 0", "b")["input_ids"])


# What is said about labels


def test_conflicts_variants_and_leaks_are_said(tmp_path: Path) -> None:
    rows = [["text", "label"], ["fine", "Positive"], ["fine", "negative"], ["bad", "negative "], ["good", "positive"],
            ["great", "positive"]]  # fmt: skip
    path = table(tmp_path / "rows.csv", rows)
    _, corpus = prepared(path)
    assert "1 text occurs with different labels, such as 'fine': 'Positive' in " in said(corpus)
    assert "white space around labels is left out, such as that of 'negative ' in 1 row" in said(corpus)
    assert "labels that differ only in case or white space are different labels: 'Positive', 'positive'" in said(corpus)
    assert "also in the training data: 5 of 5 validation texts" in said(corpus)
    held = table(tmp_path / "held.csv", [["text", "label"], ["fine", "positive"], ["new", "negative"]])
    _, corpus = prepared(path, data__validation_name=held)
    assert "also in the training data: 1 of 2 validation texts" in said(corpus)


def test_rare_labels_are_said(tmp_path: Path) -> None:
    _, corpus = prepared(labeled(tmp_path, ["often"] * 98 + ["rarely"] * 2))
    assert "rare labels in 100 rows: rarely (2.0%); data.class_weights balanced gives them more weight" in said(corpus)
    _, corpus = prepared(labeled(tmp_path, [f"class {n % 40}" for n in range(400)]))
    assert "rare labels" not in said(corpus)
    _, corpus = prepared(labeled(tmp_path, [f"sentence number {n}" for n in range(40)]))
    assert "40 of 40 labels occur only once; if the label is another column, set data.label_column" in said(corpus)


# Class weights


@pytest.mark.parametrize("kind", ["single", "multiple"])
def test_weighted_losses_equal_their_formula(kind: Any) -> None:
    draw = np.random.default_rng(0)
    width = 4 if kind == "multiple" else 1
    targets = draw.integers(0, 2 if kind == "multiple" else 4, (12, width))
    weights = balanced_weights(targets, Labels(kind, ("a", "b", "c", "d"))).double()
    batch = PackedSequences.of([np.ones(2, np.int32)] * 12, targets)
    logits = torch.from_numpy(draw.normal(size=(12, 4))).requires_grad_()
    objective = ClassifyObjective.__new__(ClassifyObjective)
    problem = {"single": "single_label_classification", "multiple": "multi_label_classification"}[kind]
    objective.head = type("Head", (), {"problem_type": problem})()  # type: ignore[assignment]
    losses = objective.losses(logits, batch, 0.0, weights)
    right = torch.from_numpy(targets)
    if kind == "single":
        counts = torch.bincount(right[:, 0], minlength=4).double()
        assert weights.tolist() == pytest.approx((12 / (4 * counts)).tolist())
        expected = -weights[right[:, 0]] * logits.log_softmax(1).gather(1, right)[:, 0]
    else:
        positive = right.sum(0).double()
        assert weights.tolist() == pytest.approx(((12 - positive) / positive).tolist())
        terms = weights * right * F.logsigmoid(logits) + (1 - right) * F.logsigmoid(-logits)
        expected = -terms.mean(1)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-9)
    ours, theirs = (torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (losses, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)

"""Numbers and codes are read as classes or as measured values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sansgpu.config import ConfigError
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.row_report import RowReport
from sansgpu.tasks.classify.labels import find_labels, with_targets
from tests.processes import write_rows
from tests.tasks.classify.label_tables import SETTINGS, labeled, prepared, said

# Classes and numbers

CLASSES: dict[str, tuple[list[Any], int, str]] = {
    "an id for each of forty": ([n % 40 for n in range(400)], 40, "40 distinct whole numbers, each in 10 rows"),
    "ids of which some are missing": ([n % 60 for n in range(300) if n % 60 not in (3, 7)], 58, "so each is a class"),
    "ids from 1": ([n % 150 + 1 for n in range(300)], 150, "so each is a class"),
    "codes with zeros": ([f"{n % 50:03}" for n in range(60)], 50, "codes such as '000'"),
    "sparse codes": ([1000 + 37 * (n % 35) for n in range(350)], 35, "so each is a class"),
    "floats of whole numbers": ([f"{17 + n % 2}.0" for n in range(10)], 2, "so each is a class"),
}
NUMBERS: dict[str, list[Any]] = {
    "fractions": ["0.5", "1", "1.5", "0.5"],
    "decimal commas": ["3,5", "1,0", "2,5", "4,0"],
    "counts of words": [n * n for n in range(200)],
    "years of each row": [1900 + n for n in range(100)],
    "ages": [18 + n % 73 for n in range(730)],
    "percentages": [n % 101 for n in range(1010)],
    "a number for each row": [*range(100)],
}


@pytest.mark.parametrize("name", CLASSES)
def test_whole_numbers_that_recur_are_classes(tmp_path: Path, name: str) -> None:
    labels, count, why = CLASSES[name]
    data, corpus = prepared(labeled(tmp_path, labels))
    assert (data.label_kind, len(data.labels)) == ("single", count)
    assert why in said(corpus)
    assert "set data.label_kind to regression" in said(corpus)


@pytest.mark.parametrize("name", NUMBERS)
def test_measures_are_predicted_as_numbers(tmp_path: Path, name: str) -> None:
    data, corpus = prepared(labeled(tmp_path, NUMBERS[name]))
    assert data.label_kind == "regression"
    assert "set data.label_kind to single" in said(corpus)
    first = float(str(NUMBERS[name][0]).replace(",", "."))
    assert corpus.train.targets[0].tolist() == [first]


def test_names_of_numbers_keep_leading_zeros_and_lose_the_point(tmp_path: Path) -> None:
    assert prepared(labeled(tmp_path, ["007", "042", "7", "007"]))[0].labels == ["007", "042", "7"]
    path = labeled(tmp_path, ["17.0", "3.0", "", "17"])
    with pytest.raises(ConfigError, match="row 3: it has no label"):
        prepared(path)
    data, corpus = prepared(path, data__on_bad_row="skip")
    assert (data.labels, len(corpus.train)) == (["3", "17"], 3)
    data, _ = prepared(
        labeled(tmp_path, ["1.0", "2.0"]), data__labels=["2.0", "1.0"]
    )  # earlier releases wrote numbers like this
    assert data.labels == ["2.0", "1.0"]


def test_a_missing_label_may_be_written_as_minus_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"a {n}", "label": v} for n, v in enumerate([0, 1, 2, -1])])
    with pytest.raises(ConfigError, match=r"line 4: its label is -1, which usually means that a row has no label"):
        prepared(path)
    assert prepared(path, data__on_bad_row="skip")[0].labels == ["0", "1", "2"]
    assert prepared(path, data__labels=["-1", "0", "1", "2"])[0].labels == ["-1", "0", "1", "2"]
    assert prepared(labeled(tmp_path, [-1, 0, 1, 0]))[0].labels == ["-1", "0", "1"]


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (["45%", "30%", "7%", "81.5 %"], "45%"),
        (["950", "1,200", "3,400.50", "20"], "1,200"),
        (["$5.50", "$7", "€ 3", "8.25"], "$5.50"),
        (["0.5", "1.5", "inf", "2.5", "3"], "inf"),
        (["0.5", "1.5", "n/a?", "2.5", "3"], "n/a?"),
    ],
)
def test_what_is_no_plain_number_is_said(labels: list[Any], named: str) -> None:
    texts = [LabeledText(f"row {n}", "a", None, label) for n, label in enumerate(labels)]
    found = find_labels(texts, SETTINGS, "rows", ())
    assert (found.kind, len(found.names)) == ("single", len({*labels}))
    assert f"labels such as {named!r} are no plain numbers" in found.notes[0]


@pytest.mark.parametrize(
    "labels", [["1 star", "2 stars", "3 stars"], ["18-25", "26-40", "41-60"], ["a", "1", "b", "2"], ["C", "C++"]]
)
def test_names_with_digits_are_classes_without_a_message(labels: list[Any]) -> None:
    texts = [LabeledText(f"row {n}", "a", None, label) for n, label in enumerate(labels)]
    assert find_labels(texts, SETTINGS, "rows", ()).notes == ()


def test_codes_are_counted_and_sorted_as_text() -> None:
    texts = [LabeledText(f"row {n}", "a", None, label) for n, label in enumerate(["7", "042", "007", "7"])]
    found = find_labels(texts, SETTINGS, "rows", ())
    assert found.names == ("007", "042", "7")
    assert "so each of the 3 is a class" in found.notes[0]


def test_a_fraction_may_be_a_class() -> None:
    texts = [LabeledText(f"row {n}", "a", None, label) for n, label in enumerate([2.5, "x", 2.5])]
    found = find_labels(texts, SETTINGS, "rows", ())
    kept, targets = with_targets(texts, found, RowReport("fail"))
    assert (found.names, len(kept), targets.tolist()) == (("2.5", "x"), 3, [[0], [1], [0]])


@pytest.mark.parametrize(
    "labels", [["joy+fear", "joy", "fear"], ["#joy #fear", "#joy", "#fear"], ["#a #b", "#b #c", "c"]]
)
def test_separators_that_do_not_split_are_said(labels: list[Any]) -> None:
    texts = [LabeledText(f"row {n}", "a", None, label) for n, label in enumerate(labels)]
    found = find_labels(texts, SETTINGS, "rows", ())
    assert (found.kind, len(found.names)) == ("single", 3)
    assert f"labels such as {labels[0]!r} are read as one label" in found.notes[0]

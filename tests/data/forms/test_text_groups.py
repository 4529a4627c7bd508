"""Anchors, positives and negatives are found by the names that public data sets give them, and none is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sansgpu.data.forms.pairs import read_text_rows
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.sources import open_sources
from sansgpu.data.tables import Columns
from sansgpu.tasks.embed.settings import EmbeddingDataConfig


def read(row: Any, columns: Columns = Columns()) -> tuple[list[tuple[str, ...]], list[str]]:  # noqa: B008
    report = RowReport("fail")
    found = read_text_rows([SourceRow("f, line 1", row)], columns, report)
    assert all(one.score is None and one.label is None for one in found)
    return [one.texts for one in found], report.notes()


GROUPS: list[tuple[Any, list[tuple[str, ...]]]] = [
    ({"anchor": "a", "positive": "p", "negatives": ["m", "n"]}, [("a", "p", "m", "n")]),
    ({"anchor": "a", "positive": "p", "negative_1": "m", "negative_2": "n"}, [("a", "p", "m", "n")]),
    ({"anchor": "a", "positive": "p", "negative1": "m", "negative2": None}, [("a", "p", "m")]),
    ({"anchor": "a", "positive": "p", "hard_negatives": ["m"], "negative": "n"}, [("a", "p", "m", "n")]),
    ({"query": "a", "positive": "p", "hard_negative": ""}, [("a", "p")]),
    ({"query": "a", "pos": ["p"], "neg": ["m", "n"]}, [("a", "p", "m", "n")]),
    ({"query": "a", "pos": ["p", "r"], "neg": ["m"]}, [("a", "p", "m"), ("a", "r", "m")]),
    ({"query": "a", "pos": "['p', 'r']", "neg": '["m"]'}, [("a", "p", "m"), ("a", "r", "m")]),  # a cell of a table
    ({"anchor": None, "positive": None, "query": "a", "pos": ["p"], "neg": None}, [("a", "p")]),  # Parquet
    ({"query": "a", "positive_passages": [{"docid": "1", "title": "T", "text": "p"}],
      "negative_passages": [{"title": "", "text": "n"}]}, [("a", "T p", "n")]),  # Tevatron
    ({"question": "a", "positive_ctxs": [{"text": "p"}], "negative_ctxs": [],
      "hard_negative_ctxs": [{"text": "n"}]}, [("a", "p", "n")]),  # DPR
    ({"query": "a", "pos": ["", "p", None], "neg": ["n", "", None]}, [("a", "p", "n")]),
    ({"query": "a", "pos": ["p", "", "r"], "neg": [None, "n"]}, [("a", "p", "n"), ("a", "r", "n")]),
    ({"query": "a", "pos": '["p", ""]', "neg": '["n", null]'}, [("a", "p", "n")]),
    ({"query": "a", "pos": ["p"], "neg": ["", None]}, [("a", "p")]),
    ({"anchor": "a", "positive": "p", "negatives": [None, "m", "", "n"]}, [("a", "p", "m", "n")]),
    ({"sent0": "a", "sent1": "p", "hard_neg": "n"}, [("a", "p", "n")]),  # SimCSE
    ({"set": ["a", "p", "r"]}, [("a", "p"), ("a", "r")]),
    (["a", "p"], [("a", "p")]),
    (["a", "p", "m", "n"], [("a", "p", "m", "n")]),
    ({"query": "a", "passage": "p"}, [("a", "p")]),
    ({"query": "a", "document": "p", "neg_1": "n"}, [("a", "p", "n")]),
    ({"query": "a", "answer": "p"}, [("a", "p")]),
    ({"question": "a", "answer": "p"}, [("a", "p")]),
    ({"Question": "a", "Answer": "p"}, [("a", "p")]),
    ({"question": "a", "answers": ["p", "r"]}, [("a", "p"), ("a", "r")]),
    ({"title": "a", "body": "p"}, [("a", "p")]),
    ({"title": "a", "abstract": "p"}, [("a", "p")]),
    ({"comment": "a", "code": "p"}, [("a", "p")]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "texts"), GROUPS, ids=range(len(GROUPS)))
def test_all_texts_of_a_row_are_read(row: Any, texts: list[tuple[str, ...]]) -> None:
    assert read(row) == (texts, [])


def test_what_is_not_used_is_named() -> None:
    row = {"query": "a", "pos": ["p"], "neg": ["n"], "pos_scores": [0.9], "query_id": 4}
    assert read(row) == ([("a", "p", "n")], ["columns not used: 'pos_scores' (1 row), 'query_id' (1)"])


def test_configured_columns_keep_their_negatives() -> None:
    columns = Columns(text="q", pair="a")
    assert read({"q": "a", "a": "p", "negatives": ["n"]}, columns) == ([("a", "p", "n")], [])
    assert read({"q": "a", "a": "p", "query": "x", "pos": ["y", "z"]}, columns)[0] == [("a", "p")]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"query": "a", "pos": []}, "it has no pos"),
        ({"query": "a", "pos": ["", None], "neg": ["n"]}, "it has no pos"),
        ({"query": "a", "pos": ["p"], "neg": ["n", " "]}, "its neg is empty"),
        ({"query": "a", "pos": ["p"], "neg": ["n", 3]}, "its neg contains 3, which is not text"),
        ({"pos": ["p"], "neg": ["n"]}, "it has no anchor"),
        ({"query": "a", "positive_passages": [{"docid": "1"}]}, "its positive_passages contains None"),
        ({"set": ["a"]}, "its set has fewer than two texts"),
        (["a"], "it is of type list instead of an object"),
        ({"question": "a", "passage": "p", "relevance": 0}, "set data.label_column to relevance if it is the simil"),
    ],
)
def test_a_row_without_two_texts_is_bad(row: Any, problem: str) -> None:
    with pytest.raises(BadRowError, match=problem):
        read(row)


@pytest.mark.parametrize(
    "row", [{"question": "a", "answer": "p", "score": 0.5}, {"anchor": "a", "positive": "p", "similarity": 0.5}]
)
def test_a_pair_with_a_score_is_no_pair_of_equal_meaning(row: dict[str, Any]) -> None:
    report = RowReport("fail")
    (found,) = read_text_rows([SourceRow("f, line 1", row)], Columns(), report)
    assert (found.texts, found.score, report.notes()) == (("a", "p"), 0.5, [])


def test_the_forms_may_differ_from_row_to_row_and_are_read_from_files(tmp_path: Path) -> None:
    rows = [row for row, _ in GROUPS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for name in ("rows.jsonl", "rows.json"):
        source = open_sources(EmbeddingDataConfig(dataset_name=str(tmp_path / name))).train
        found = read_text_rows(source.rows(), Columns(), RowReport("fail"))
        assert [one.texts for one in found] == [texts for _, own in GROUPS for texts in own]
    (tmp_path / "rows.csv").write_text('query,pos,neg\na,p,"[""m"", ""n""]"\n')
    source = open_sources(EmbeddingDataConfig(dataset_name=str(tmp_path / "rows.csv"))).train
    assert [one.texts for one in read_text_rows(source.rows(), Columns(), RowReport("fail"))] == [("a", "p", "m", "n")]


@pytest.mark.parametrize("name", ["score", "label"])
def test_scores_may_have_a_decimal_comma(name: str) -> None:
    rows = [SourceRow(f"row {n}", {"text1": "a", "text2": "b", name: score}) for n, score in enumerate(["4,8", " 0.5"])]
    assert [row.score for row in read_text_rows(rows, Columns(), RowReport("fail"))] == [4.8, 0.5]


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"Anchor": "a", "Positive": "p", "Negative": "n"}, ("a", "p", "n")),
        ({"Sentence1": "a", "Sentence2": "b", "Score": 0.5}, ("a", "b")),
        ({"Text": "a", " Label": "x"}, ("a",)),
    ],
)
def test_names_of_columns_may_have_capitals(row: dict[str, Any], texts: tuple[str, ...]) -> None:
    report = RowReport("fail")
    (found,) = read_text_rows([SourceRow("f, line 1", row)], Columns(), report)
    assert (found.texts, report.notes()) == (texts, [])

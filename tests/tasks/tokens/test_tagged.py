"""Tagged texts are read in every form; invalid rows are named with file and line."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.forms.tags import untagged_text
from sansgpu.data.forms.words import TaggedText
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import open_sources
from sansgpu.tasks.tokens.tagged import in_iob2, read_tagged, require_labels, with_targets
from tests.hostile.fuzz.values import changed

CONLL = "-DOCSTART- -X- O\n\nAda NNP B-person\nlives VB O\n\nin IN O\nNew NNP B-place\nYork NNP I-place\n. . O\n"
READ = [("Ada lives", ("B-person", "O")), ("in New York .", ("O", "B-place", "I-place", "O"))]


def source_of(path: Path, tag_column: int | None = None) -> Any:
    return open_sources(DataConfig(dataset_name=str(path), tag_column=tag_column)).train


def read(path: Path, tag_column: int | None = None) -> list[TaggedText]:
    return tagged(source_of(path, tag_column).rows())


def tagged(rows: Iterable[SourceRow], report: RowReport | None = None) -> list[TaggedText]:
    return read_tagged(rows, report or RowReport("fail"), TaggedDataConfig(), "rows", [])


def from_row(**columns: Any) -> TaggedText:
    (text,) = tagged([SourceRow("rows.jsonl, line 7", columns)])
    return text


def shown(texts: list[TaggedText]) -> list[tuple[str, tuple[str, ...]]]:
    return [(text.text, text.tags) for text in texts]


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("train.conll", CONLL, None),
        ("train.conll.gz", CONLL, None),
        ("train.conll", CONLL.replace(" ", "\t").replace("\n", "\r\n"), None),
        ("train.conll", CONLL.replace("\n\n", "\n\t\n").rstrip("\n"), None),
        ("train.txt", CONLL, -1),
        ("train.annotated", CONLL, 2),
    ],
)
def test_columns_of_conll(tmp_path: Path, name: str, content: str, column: int | None) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    texts = read(path, column)
    assert shown(texts) == READ
    assert [text.where.split(", ")[1] for text in texts] == ["line 3", "line 6"]
    assert [texts[1].word(number) for number in range(4)] == ["in", "New", "York", "."]


def test_another_column_has_other_tags_and_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text(CONLL)
    assert read(tmp_path / "train.conll", 1)[0].tags == ("NNP", "VB")
    assert len({source_of(tmp_path / "train.conll", column).fingerprint for column in (None, 1, -2)}) == 3


def test_sentences_are_texts_for_other_tasks(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text(CONLL)
    assert [piece.text for piece in source_of(tmp_path / "train.conll").read()] == [text for text, _ in READ]


@pytest.mark.parametrize(
    ("line", "column", "problem"),
    [
        ("York", None, "line 4 has 1 column, so there is no tag in column -1; fix the line or set data.tag_column."),
        ("York NNP O", 7, "line 1 has 3 columns, so there is no tag in column 7; fix the line or set data.tag_column."),
        ("York\t", None, "line 4 has 1 column, so there is no tag in column -1"),
        ("Y\\xff O", None, "line 4 is not UTF-8 text (byte 0xff)."),
    ],
)
def test_a_bad_line_makes_its_sentence_a_bad_row(tmp_path: Path, line: str, column: Any, problem: str) -> None:
    content = f"Ada NNP O\n\nNew NNP O\n{line}\n".encode().replace(b"\\xff", b"\xff")
    (tmp_path / "a.conll").write_bytes(content)
    with pytest.raises(BadRowError) as caught:
        read(tmp_path / "a.conll", column)
    assert str(caught.value).startswith(f"{tmp_path / 'a.conll'}, {problem.removesuffix('.')}")
    if column is None:
        skipping = RowReport("skip")
        assert len(tagged(source_of(tmp_path / "a.conll").rows(), skipping)) == 1
        assert skipping.skipped == 1


def test_a_file_without_empty_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sansgpu.data.conll.MAX_TOKENS", 3)
    (tmp_path / "a.conll").write_text("a O\n" * 4)
    with pytest.raises(ConfigError, match=r"a\.conll, line 1: the sentence has more than 3 tokens"):
        read(tmp_path / "a.conll")


@pytest.mark.parametrize("key", ["tags", "ner_tags"])
def test_lists_of_tokens_and_tags(tmp_path: Path, key: str) -> None:
    row = {"tokens": ["in", "New York", "."], key: ["O", "B-place", "O"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (text,) = read(tmp_path / "rows.jsonl")
    assert (text.text, text.tags, text.word(1)) == ("in New York .", ("O", "B-place", "O"), "New York")


def test_spans_of_characters_tag_the_words_in_them() -> None:
    spans = [{"start": 12, "end": 17, "label": "place"}, {"start": 0, "end": 3, "label": "person", "text": "Zoë"}]
    text = from_row(text="Zoë 🎉 is in Paris's 東京.", spans=spans)
    words = ["Zoë", "🎉", "is", "in", "Paris", "'", "s", "東", "京", "."]
    assert [text.word(number) for number in range(len(text.tags))] == words
    assert text.tags == ("B-person", "O", "O", "O", "B-place", "O", "O", "O", "O", "O")
    assert text.moved_spans == 0
    assert from_row(text="東京 is", spans=[{"start": 0, "end": 2, "label": "x"}]).tags == ("B-x", "I-x", "O")
    assert from_row(text="Nothing here.", spans=[]).tags == ("O",) * 3


def test_a_span_within_a_word_is_extended_and_counted() -> None:
    notes: list[str] = []
    text = from_row(
        text="unhappy man", spans=[{"start": 2, "end": 7, "label": "x"}, {"start": 7, "end": 9, "label": "y"}]
    )
    assert text.tags == ("B-x", "B-y")
    in_iob2([text], "rows", notes)
    assert notes == ["rows: 2 spans start or end inside a word and were extended to whole words."]


def span(**changes: Any) -> dict[str, Any]:
    row = {"text": "Ada is.", "spans": [{"start": 0, "end": 3, "label": "p"} | changes]}
    return row


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (["a"], "it is of type list instead of an object"),
        ({"phrase": "a"}, "it has the columns phrase, but needs `tokens` and `tags`, or `text` and `spans`"),
        ({"tokens": ["a"]}, "it has no tags or ner_tags"),
        ({"tokens": [], "tags": []}, "its tokens are not a non-empty list"),
        ({"tokens": "a", "tags": ["O"]}, "its tokens are not a non-empty list"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, "token 1 is empty"),
        ({"tokens": [" "], "tags": ["O"]}, "its tokens contain only white space"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "its tokens contains 3, which is not text"),
        ({"tokens": ["a", "b"], "tags": ["O"]}, "its tags have 1 value for 2 tokens"),
        ({"tokens": ["a"], "tags": "O"}, "its tags are of type str instead of a list"),
        ({"tokens": ["a", "b"], "ner_tags": [3, -100]}, "its ner_tags contain -100; give each word a tag"),
        ({"tokens": ["a", "b"], "ner_tags": [3, "O"]}, "its ner_tags contains 3, which is not text"),
        ({"tokens": ["a"], "tags": [None]}, "its tags contains None, which is not text"),
        ({"tokens": ["a"], "tags": [""]}, "a tag is empty"),
        ({"tokens": ["a", "b"], "tags": ["B-x", "x"]}, "its tag 'x' is neither O nor starts with B-, I-, E- or S-"),
        ({"tokens": ["\ud800"], "tags": ["O"]}, "its tokens contains an unpaired surrogate"),
        ({"text": " \n", "spans": []}, "it has no text"),
        ({"text": "a"}, "it has no list `spans`"),
        ({"text": "a", "spans": ["x"]}, "span 0 is not an object"),
        (span(end=8), "span 0 from 0 to 8 is empty or not within the 7 characters"),
        (span(start=-1), "span 0 from -1 to 3"),
        (span(start=3), "span 0 from 3 to 3 is empty"),
        (span(start=True), "span 0 is from True to 3, which are not both integers"),
        (span(start=3, end=4), "span 0 from 3 to 4 contains only white space"),
        (span(label=""), "span 0 has the label '', which is not an entity name"),
        (span(text="Ida"), "span 0 has the text 'Ida', but its characters are 'Ada'"),
    ],
)  # fmt: skip
def test_a_bad_row_is_one_sentence_with_its_place(row: Any, problem: str) -> None:
    with pytest.raises(BadRowError) as caught:
        tagged([SourceRow("rows.jsonl, line 7", row)])
    assert str(caught.value).startswith(f"rows.jsonl, line 7: {problem}")
    assert str(caught.value).endswith("fix or remove the row, or set data.on_bad_row to skip.")


def test_unknown_tags_and_a_single_one_are_refused() -> None:
    text = from_row(tokens=["a", "b"], tags=["O", "B-x"])
    with pytest.raises(BadRowError, match=r"rows\.jsonl, line 7: its tag 'B-x' is not one of the model's labels"):
        with_targets([text], ["O", "B-y", "I-y"], RowReport("fail"))
    with pytest.raises(ConfigError, match=r"rows: every word has the tag 'O', so there is nothing to learn"):
        require_labels([from_row(tokens=["a"], tags=["O"])], "rows")


def test_rows_to_predict_need_no_tags() -> None:
    assert untagged_text(SourceRow("row 1", {"tokens": ["a", "b"]})).text == "a b"
    assert untagged_text(SourceRow("row 1", {"text": "a b"})).tags == ()


def test_odd_values_are_read_or_answered_by_one_sentence() -> None:
    draw = random.Random(0)
    rows = [
        {"tokens": ["New", "York"], "tags": ["B-x", "I-x"]},
        {"tokens": ["a"], "ner_tags": ["NOUN"]},
        {"text": "Ada is here.", "spans": [{"start": 0, "end": 3, "label": "p", "text": "Ada"}]},
    ]
    refused: list[str] = []
    for _ in range(600):
        row = changed(draw.choice(rows), draw)
        try:
            texts = in_iob2(tagged([SourceRow("rows.jsonl, line 7", row)]), "rows", [])
        except BadRowError as error:
            refused.append(str(error))
        else:
            assert all(len(text.tags) == len(text.starts) for text in texts)
    assert 100 < len(refused) < 600
    assert all(said.startswith("rows.jsonl, line 7: ") and len(said) < 700 for said in refused)


@pytest.mark.parametrize(
    ("tags", "problem"),
    [
        (["B-PER", "I-PER", "X-PER", "O"], "its tag 'X-PER' is neither O nor starts with B-"),
        (["b-per", "i-per", "x-per", "O"], "its tag 'x-per' is neither O nor starts with B-"),
        (["B_PER", "I_PER", "PER", "O"], "its tag 'PER' is neither O nor starts with B-"),
        (["B-", "I-", "O"], "its tag 'B-' has no label, as in B-PER"),
        (["B-PER", "B-", "O"], "its tag 'B-' has no label, as in B-PER"),
    ],
)
def test_tags_that_are_spelled_unlike_the_others_are_bad_rows(tags: list[str], problem: str) -> None:
    rows = [{"tokens": [tag], "tags": [tag]} for tag in tags]
    with pytest.raises(BadRowError, match=problem):
        tagged(SourceRow(f"row {number}", row) for number, row in enumerate(rows, 1))

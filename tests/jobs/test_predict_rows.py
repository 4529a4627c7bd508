"""`sansgpu predict --data` reads rows of every form, predicts them in chunks, and writes all of them or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sansgpu.config import DataConfig
from sansgpu.jobs.predict import rows_of
from sansgpu.tasks import inference
from tests.processes import Captured, printed, refused, write_rows
from tests.tasks.folders import model_folder

pytestmark = pytest.mark.usefixtures("home")

ROWS = [{"question": f"Which fox is {word}?", "context": f"The {word} fox sleeps."} for word in ("red", "old", "new")]


def predicted(capsys: Captured, rows: Path, *more: str) -> str:
    return printed(capsys, "predict", model_folder("bert"), "--data", rows, *more)


def refusal(capsys: Captured, rows: Path, *more: str) -> str:
    return refused(capsys, "predict", model_folder("bert"), "--data", rows, *more)


def test_a_decoder_that_compares_the_logits_of_two_tokens_is_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    modules = [
        {"type": f"sentence_transformers.cross_encoder.modules.{name}"} for name in ("Transformer", "LogitScore")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    said = refused(capsys, "predict", tmp_path, "--text", "a fox", "--text-pair", "It sleeps.")
    assert "scores pairs of texts by the logits of two tokens" in said


def test_rows_are_predicted_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """The rows, their order and the predictions do not depend on the size of the chunks."""
    monkeypatch.setattr(inference, "CHUNK_ROWS", 2)
    rows, output = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "new/out.jsonl"
    in_chunks = predicted(capsys, rows)
    assert predicted(capsys, rows, "--output", str(output)) == ""
    assert output.read_text(encoding="utf-8") == in_chunks
    monkeypatch.undo()
    at_once = predicted(capsys, rows)
    assert [_answer(line) for line in at_once.splitlines()] == [_answer(line) for line in in_chunks.splitlines()]
    assert len(at_once.splitlines()) == 3


def _answer(line: str) -> tuple[str, float]:
    row = json.loads(line)
    return row["answer"], pytest.approx(row["probability"], rel=1e-4)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "Who?"}, "rows.jsonl, line 3: it has no context; fix or remove the row."),
        ({"question": 5, "context": "a"}, "rows.jsonl, line 3: it has no question; fix or remove the row."),
        ([1], "rows.jsonl, line 3: it is not an object with columns; fix or remove the row."),
        ({"question": "fox " * 600, "context": "a"}, "rows.jsonl, line 3 has "),
    ],
)
def test_a_bad_row_of_a_later_chunk_is_reported_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, row: Any, sentence: str
) -> None:
    monkeypatch.setattr(inference, "CHUNK_ROWS", 2)
    rows, output = write_rows(tmp_path / "rows.jsonl", [*ROWS[:2], row]), tmp_path / "out.jsonl"
    assert sentence in refusal(capsys, rows, "--output", str(output))
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["rows.jsonl"]


def test_lines_that_cannot_be_read_are_named(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "rows.tsv").write_bytes(b"question\tcontext\nWho?\n")
    assert "rows.tsv, line 2 has 1 columns, but the header has 2" in refusal(capsys, tmp_path / "rows.tsv")
    (tmp_path / "rows.jsonl").write_bytes(b"{\n")
    assert "rows.jsonl, line 1 is not valid JSON" in refusal(capsys, tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_bytes(b"\n")
    assert refusal(capsys, tmp_path / "rows.jsonl").endswith("rows.jsonl has no rows; pass a file with at least one.")
    (tmp_path / "lines.txt").write_bytes(b"Who?\n")
    assert "lines.txt, line 1: it has no question" in refusal(capsys, tmp_path / "lines.txt")


def test_a_table_is_answered(tmp_path: Path, capsys: Captured) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    lines = ["question\tcontext", *("\t".join(row.values()) for row in ROWS)]
    (tmp_path / "rows.tsv").write_text("\n".join(lines), encoding="utf-8")
    assert predicted(capsys, tmp_path / "rows.tsv") == predicted(capsys, rows)


def warn(message: str) -> None:
    raise AssertionError(message)


def test_each_line_of_a_text_file_is_a_row_with_the_column_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo", encoding="utf-8")
    for column in ("text", "sentence", 5, -1):
        rows = rows_of(str(tmp_path / "lines.txt"), DataConfig(text_column=column), warn)
        assert [(row, row.where) for row in rows] == [
            ({column: "one"}, f"{tmp_path}/lines.txt, line 1"),
            ({column: "two"}, f"{tmp_path}/lines.txt, line 3"),
        ]


def test_rows_of_a_table_without_a_header_have_the_columns_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("a\tb\nc\td\n", encoding="utf-8")
    rows = list(rows_of(str(tmp_path / "rows.tsv"), DataConfig(text_column=1), warn))
    assert rows == [{0: "a", 1: "b"}, {0: "c", 1: "d"}]
    assert list(rows_of(str(tmp_path / "rows.tsv"), DataConfig(), warn)) == [{"a": "c", "b": "d"}]


def test_each_question_of_nested_articles_is_answered(tmp_path: Path, capsys: Captured) -> None:
    """Nested SQuAD JSON gives the same answers as flat rows, plus each question's id, even if ids repeat."""
    ids = ["a", "b", "b"]
    articles = [
        {"paragraphs": [{"context": row["context"], "qas": [{"id": name, "question": row["question"]}]}]}
        for name, row in zip(ids, ROWS, strict=True)
    ]
    articles[0]["paragraphs"] += articles.pop()["paragraphs"]
    (tmp_path / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    flat = write_rows(tmp_path / "flat.jsonl", [ROWS[0], ROWS[2], ROWS[1]])
    answered = [json.loads(line) for line in predicted(capsys, tmp_path / "squad.json").splitlines()]
    assert [row.pop("id") for row in answered] == ids
    assert answered == [json.loads(line) for line in predicted(capsys, flat).splitlines()]
    for row, given in zip(answered, (ROWS[0], ROWS[2], ROWS[1]), strict=True):
        assert given["context"][row["start"] : row["end"]] == row["answer"]
        assert row["score"] == row["probability"]


def test_a_damaged_question_of_an_article_is_named(tmp_path: Path, capsys: Captured) -> None:
    articles = [{"paragraphs": [{"context": "A fox.", "qas": [{"question": "Who?"}, "What?"]}]}]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}), encoding="utf-8")
    assert "squad.json, row 1, paragraph 1, question 2: it is not an object" in refusal(capsys, tmp_path / "squad.json")

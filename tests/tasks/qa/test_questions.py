"""Questions are read in every format; invalid rows are named."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.forms.questions import Question, read_questions
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.data.sources import open_sources

CONTEXT = "The cat sat on the mat. It slept there."


def no_warning(message: str) -> None:
    raise AssertionError(message)


def read(path: Path, on_bad_row: Any = "fail", warn: Any = no_warning) -> list[Question]:
    source = open_sources(DataConfig.model_validate({"dataset_name": str(path)})).train
    return read_rows(source.rows(), on_bad_row, warn)


def read_rows(rows: Iterable[SourceRow], on_bad_row: Any = "fail", warn: Any = no_warning) -> list[Question]:
    bad_rows = RowReport(on_bad_row)
    questions = read_questions(rows, bad_rows)
    bad_rows.report(warn)
    return questions


def flat(**changes: Any) -> dict[str, Any]:
    row = {"id": "a", "question": "Who sat?", "context": CONTEXT, "answers": {"text": ["cat"], "answer_start": [4]}}
    return {key: value for key, value in (row | changes).items() if value is not ...}


def nested(*asked: Any, context: Any = CONTEXT) -> dict[str, Any]:
    return {"title": "Cats", "paragraphs": [{"context": context, "qas": list(asked)}]}


def test_nested_articles_of_the_first_version(tmp_path: Path) -> None:
    answers = [{"text": "cat", "answer_start": 4}, {"text": "The cat", "answer_start": 0}]
    article = nested({"id": "1", "question": "Who sat?", "answers": answers})
    article["paragraphs"] += nested(
        {"id": "2", "question": "Where?", "answers": [{"text": "here", "answer_start": 3}]}, context="Is here."
    )["paragraphs"]
    (tmp_path / "train.json").write_text(json.dumps({"version": "1.1", "data": [article, nested()]}))
    assert read(tmp_path / "train.json") == [
        Question("1", "Who sat?", CONTEXT, ((4, "cat"), (0, "The cat")), False),
        Question("2", "Where?", "Is here.", ((3, "here"),), False),
    ]


def test_nested_articles_of_the_second_version(tmp_path: Path) -> None:
    plausible = [{"text": "cat", "answer_start": 4}]
    article = nested(
        {"id": "1", "question": "Who ran?", "answers": [], "is_impossible": True, "plausible_answers": plausible},
        {"id": "2", "question": "Who sat?", "answers": plausible, "is_impossible": False},
        {"id": "3", "question": "Who fled?", "is_impossible": True},
    )
    (tmp_path / "train.json").write_text(json.dumps({"version": "v2.0", "data": [article]}))
    notes: list[str] = []
    assert read(tmp_path / "train.json", warn=notes.append) == [
        Question("1", "Who ran?", CONTEXT, (), True),
        Question("2", "Who sat?", CONTEXT, ((4, "cat"),), False),
        Question("3", "Who fled?", CONTEXT, (), True),
    ]
    assert notes == ["columns not used: 'plausible_answers' (1 row)"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_flat_columns(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train{suffix}"
    empty: dict[str, list[Any]] = {"text": [], "answer_start": []}
    rows = [flat(), flat(id="b", answers={"text": ["It", "cat"], "answer_start": [24, 4]}), flat(id="c", answers=empty)]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows))
    assert read(path) == [
        Question("a", "Who sat?", CONTEXT, ((4, "cat"),), False),
        Question("b", "Who sat?", CONTEXT, ((24, "It"), (4, "cat")), False),
        Question("c", "Who sat?", CONTEXT, (), True),
    ]


def test_answers_may_be_a_list_of_objects_and_ids_numbers() -> None:
    rows = [
        SourceRow("x", flat(id=7, answers=[{"text": "cat", "answer_start": 4}])),
        SourceRow("y", flat(answers=[])),
    ]
    first, second = read_rows(rows)
    assert (first.id, first.answers, first.impossible) == ("7", ((4, "cat"),), False)
    assert (second.answers, second.impossible) == ((), True)


def test_a_question_without_an_id_is_named_by_its_place(tmp_path: Path) -> None:
    asked = {"question": "Who?", "answers": []}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [flat(id=...), nested(asked, asked), flat()])))
    ids = [question.id for question in read(tmp_path / "train.jsonl")]
    assert ids[0].endswith("train.jsonl, line 1")
    assert ids[3] == "a"
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("text", "start", "found"),
    [
        ("cat", 4, (4, "cat")),
        (" cat", 3, (3, " cat")),  # unchanged
        ("cat", 3, (4, "cat")),
        (" cat", 4, (4, "cat")),
        ("slept \n", 27, (27, "slept")),
        ("\tcat sat\n", 3, (4, "cat sat")),
    ],
)
def test_an_answer_with_stripped_white_space_is_found(text: str, start: int, found: tuple[int, str]) -> None:
    answers = {"text": [text], "answer_start": [start]}
    (question,) = read_rows([SourceRow("x", flat(answers=answers))])
    assert question.answers == (found,)


WRITTEN: list[tuple[dict[str, Any], tuple[tuple[int, str], ...]]] = [
    (flat(answers="cat"), ((4, "cat"),)),
    (flat(answers=["cat", "The cat"]), ((4, "cat"), (0, "The cat"))),
    (flat(answers={"text": "cat", "answer_start": 4}), ((4, "cat"),)),
    (flat(answers={"text": ["cat"], "answer_start": [None]}), ((4, "cat"),)),
    (flat(answers=[{"text": "there"}]), ((33, "there"),)),
    (flat(answers=..., answer="cat", answer_start=4), ((4, "cat"),)),
    (flat(answers=..., answer_text="cat", answer_start="4"), ((4, "cat"),)),  # a cell of a table
    (flat(answers='{"text": ["cat"], "answer_start": [4]}'), ((4, "cat"),)),
    (flat(answers="{'text': array(['cat'], dtype=object), 'answer_start': array([4])}"), ((4, "cat"),)),  # pandas
    (flat(answers={"text": [], "answer_start": []}), ()),
    (flat(answers={"text": [], "answer_start": []}, is_impossible=True), ()),
    (flat(answers={"text": [""], "answer_start": [-1]}, is_impossible=True), ()),
    (flat(answers="", is_impossible="True"), ()),
    (flat(answers=[], is_impossible=1), ()),
    (flat(answers=None, is_impossible=True), ()),
    (flat(answers="", is_impossible=""), ()),  # cells of a table
]


@pytest.mark.parametrize(("row", "answers"), WRITTEN, ids=range(len(WRITTEN)))
def test_answers_are_read_as_people_write_them(row: dict[str, Any], answers: tuple[tuple[int, str], ...]) -> None:
    (question,) = read_rows([SourceRow("x", row)])
    assert (question.answers, question.impossible) == (answers, not answers)


MEETING = "🎉🎉 Éva met Tom in São Paulo. Tom left."


@pytest.mark.parametrize(
    ("text", "start", "place", "said"),
    [
        ("Éva", 3, 3, []),
        ("Éva", 5, 3, ["UTF-16"]),
        ("Tom", 13, 11, ["UTF-16"]),  # is at two places, but only one has this offset
        ("Tom", 18, 11, ["UTF-16"]),  # in bytes
        ("São Paulo", 25, 18, ["UTF-16"]),
        ("São Paulo", 0, 18, ["occur once"]),
        ("left", -1, 33, ["occur once"]),
        ("left", 4000, 33, ["occur once"]),
    ],
)
def test_an_answer_is_found_though_its_offset_is_wrong(text: str, start: int, place: int, said: list[str]) -> None:
    answers = {"text": [text], "answer_start": [start]}
    notes: list[str] = []
    (question,) = read_rows([SourceRow("x", flat(context=MEETING, answers=answers))], warn=notes.append)
    assert question.answers == ((place, text),)
    assert len(notes) == len(said)
    assert all(word in note and note.endswith(": 1 row") for word, note in zip(said, notes, strict=True))


def test_what_is_not_used_of_questions_is_named() -> None:
    asked = {
        "id": "1",
        "question": "Who?",
        "answers": [{"text": "cat", "answer_start": 4, "answer_end": 7}],
        "level": 2,
    }
    article = nested(asked) | {"url": "x"}
    notes: list[str] = []
    read_rows([SourceRow("x", article)], warn=notes.append)
    assert notes == ["columns not used: 'url' (1 row), 'level' (1), 'answer_end in answers' (1)"]


def answer(text: Any, start: Any) -> dict[str, Any]:
    return flat(answers={"text": [text], "answer_start": [start]})


BAD = [
    ("a row", "x: it is of type str instead of an object"),
    ([1], "x: it is of type list instead of an object"),
    (flat(question=...), "x: it has no question"),
    (flat(question=" "), "x: it has no question"),
    (flat(question=3), "x: it has no question"),
    (flat(context=None), "x: it has no context"),
    (flat(context=""), "x: it has no context"),
    (flat(context="\ud800 cat"), "x: its context contains an unpaired surrogate"),
    (flat(question="\udfff?"), "x: its question contains an unpaired surrogate"),
    (answer("\ud83c", 4), "x: an answer contains an unpaired surrogate"),
    (flat(id=[1]), r"x: its id is \[1\]"),
    (flat(id="\ud800"), r"x: its id is '\\ud800'"),
    (answer("", 4), "x: an answer has no text"),
    (answer("  ", 3), "x: an answer has no text"),
    (answer(None, 4), "x: an answer has no text"),
    (answer("dog", 4), "x: the answer 'dog' is not at character 4 of the context, nor anywhere else in it"),
    (answer("he", 4), "x: the answer 'he' is not at character 4 of the context, nor anywhere else in it"),  # in "the"
    (
        flat(context="A cat. A cat.", answers={"text": ["cat"], "answer_start": [3]}),
        "x: the answer 'cat' is not at character 3 of the context, but is at 2 places in it, so it is unclear which",
    ),
    (flat(context="A cat. A cat.", answers=["cat"]), "x: the answer 'cat' has no answer_start, but is at 2 places"),
    (flat(answers="dog"), "x: the answer 'dog' is not in the context"),
    (flat(answers=["cat", 3]), "x: its answers are not a text, a list of texts, or objects"),
    (answer("cat", 4.0), "x: the answer 'cat' starts at 4.0, which is not an integer"),
    (answer("cat", True), "x: the answer 'cat' starts at True"),
    (flat(answers={"text": ["cat", "The"], "answer_start": [4]}), "x: its answers have 2 texts, but 1 starts"),
    (flat(answers={"text": ["cat"]}), "x: its answers lack the lists"),
    (flat(answers=...), "x: it has no answers"),
    (flat(is_impossible=True), "x: is_impossible is true, but there are answers"),
    (flat(answers=None), "x: it has no answers; write an empty list for a question without an answer"),
    (flat(answers=None, is_impossible=None), "x: it has no answers; write an empty list"),
    (flat(answers=None, is_impossible=False), "x: is_impossible is false, but there are no answers"),
    (flat(answers=[], is_impossible=False), "x: is_impossible is false, but there are no answers"),
    (flat(answers="", is_impossible="False"), "x: is_impossible is false, but there are no answers"),
    (flat(answers={"text": [], "answer_start": []}, is_impossible=0), "x: is_impossible is false, but there are no"),
    (flat(is_impossible="no"), "x: is_impossible is 'no'"),
    ({"paragraphs": {}}, "x: its paragraphs are not a list"),
    ({"paragraphs": [3]}, "x, paragraph 1: it needs a list `qas` of questions"),
    ({"paragraphs": [{"context": "c", "qas": None}]}, "x, paragraph 1: it needs a list `qas` of questions"),
    (nested("who"), "x, paragraph 1, question 1: it is of type str"),
    (nested({"question": "Who?"}), "x, paragraph 1, question 1: it has no answers"),
    (
        nested({"question": "Who?", "id": "b", "answers": []}, context=None),
        r"x, paragraph 1, question 1 \(id b\): it has no context",
    ),
    (
        nested({"question": "Who?", "id": "b", "answers": [{"text": "dog", "answer_start": 0}]}),
        r"x, paragraph 1, question 1 \(id b\): the answer 'dog' is not at character 0 of the context",
    ),
]


@pytest.mark.parametrize(("value", "problem"), BAD, ids=range(len(BAD)))
def test_every_bad_row_is_named_and_can_be_skipped(value: Any, problem: str) -> None:
    rows = [SourceRow("w", flat(id="before")), SourceRow("x", value), SourceRow("y", flat(id="after"))]
    with pytest.raises(ConfigError, match=f"^{problem}") as refused:
        read_rows(rows)
    str(refused.value).encode()
    warnings: list[str] = []
    assert [question.id for question in read_rows(rows, "skip", warnings.append)] == ["before", "after"]
    named, hint, _ = str(refused.value).partition(", or set data.on_bad_row to skip.")
    assert hint
    assert warnings == [f"bad rows skipped: 1 of 3; the first: {named}."]


def test_a_single_warning_counts_bad_rows_and_names_the_first(tmp_path: Path) -> None:
    bad_question = {"id": "n", "question": "", "answers": []}
    lines = [json.dumps(flat()), "{half a row", json.dumps(flat()), json.dumps(nested(bad_question)), "3"]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 2 is not valid JSON"):
        read(tmp_path / "train.jsonl")
    warnings: list[str] = []
    assert [question.id for question in read(tmp_path / "train.jsonl", "skip", warnings.append)] == ["a"]
    (warning,) = warnings
    assert warning.startswith("bad rows skipped: 4 of 5; the first: ")
    assert "line 2 is not valid JSON" in warning


def test_an_id_given_twice_is_bad_though_it_comes_from_another_article() -> None:
    asked = {"id": "a", "question": "Who?", "answers": []}
    with pytest.raises(
        ConfigError, match=r"y, paragraph 1, question 1 \(id a\): an earlier question has the same id a"
    ):
        read_rows([SourceRow("x", flat()), SourceRow("y", nested(asked))])

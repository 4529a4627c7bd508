"""Every form of rows reads its example, and columns mean the same in all tasks that read them."""

import cProfile
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sansgpu.data.files import read_rows
from sansgpu.data.forms.chats import CONVERSATIONS, PROMPTS
from sansgpu.data.forms.form import USUAL, Form
from sansgpu.data.forms.labels import unlabeled_text
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.preview.canonical import same_content
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.tables import Columns
from sansgpu.tasks.registry import TASKS

ASKED, GIVEN = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN, GPT = {"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}


def forms() -> Iterator[Any]:
    for kind, found in FORMS.items():
        for form in found.forms:
            yield pytest.param(kind, form, id=f"{kind}: {' and '.join(form.keys)}")


def read(kind: str, row: dict[str, Any]) -> list[Any]:
    return [FORMS[kind].read(single) for single in FORMS[kind].single_rows([SourceRow("rows.jsonl, line 1", row)])]


@pytest.mark.parametrize(("kind", "form"), [*forms()])
def test_a_form_recognizes_and_reads_its_example(kind: str, form: Form[Any]) -> None:
    row: dict[str, Any] = json.loads(json.dumps(form.example))
    assert next(one for one in FORMS[kind].forms if one.fits(row, USUAL)) is form
    assert {*form.keys} <= {*row} <= {*form.keys, *form.optional}
    assert all(read(kind, row))
    if kind != "prompts":  # whose other columns are for rewards
        assert repr(read(kind, {**row, "unrelated": 2})) == repr(read(kind, row))


# Rows with columns that are not in the examples of the forms.
OTHER_ROWS: dict[str, list[dict[str, Any]]] = {
    "questions": [
        {"question": "q?", "context": "a b", "answer": "a"},
        {"question": "q?", "context": "a b", "answer_text": "a", "answer_start": 0},
        {"question": "q?", "context": "a b", "answers": [], "is_impossible": True},
    ],
    "text groups": [
        {"premise": "a", "hypothesis": "b", "label": "neutral"},
        {"question1": "a", "question2": "b", "is_duplicate": 1},
        {"sentence1": "a", "sentence2": "b", "relatedness_score": 1.5},
        {"query": "a", "document": "b", "negatives": ["c"]},
    ],
    "labeled texts": [{"premise": "a", "hypothesis": "b", "label": "neutral"}, {"content": "a", "label": "x"}],
    "tagged texts": [
        {"tokens": ["a"], "ner_tags": ["O"]},
        {"text": "a", "spans": [], "answer": "reject"},
        {"text": "a", "annotation_id": 3},
    ],
    "conversations": [{"prompt": "a", "response": "b", "images": ["x.png"]}],
    "preferences": [{"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 2}],
}


def rows_of_all_kinds() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, found in FORMS.items():
        rows = [*(json.loads(json.dumps(form.example)) for form in found.forms), *OTHER_ROWS.get(kind, [])]
        yield from ((kind, row) for row in rows if "vertexSet" not in row)


@pytest.mark.parametrize("change", [str.title, str.upper])
def test_names_of_columns_may_have_capitals(change: Callable[[str], str]) -> None:
    def found(kind: str, row: dict[str, Any]) -> Any:
        try:
            return read(kind, row)
        except BadRowError as error:
            return str(error).casefold()

    for kind, row in rows_of_all_kinds():
        given, other = found(kind, row), found(kind, {change(name): value for name, value in row.items()})
        are_equal = given == other if isinstance(given, str) else all(map(same_content, given, other))
        assert type(given) is type(other), (kind, row)
        assert are_equal, (kind, row)


def test_every_form_is_read_by_a_task_and_every_task_reads_one() -> None:
    assert {task.settings.rows for task in TASKS.values()} == {*FORMS}


def test_forms_need_no_torch() -> None:
    program = "import sys, sansgpu.data.forms.registry; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


def test_columns_are_found_by_the_values_of_each_row() -> None:
    """What is remembered of rows with the same columns does not apply to rows with other types of values."""
    rows = [{"a": "x", "b": 1, "label": "y"}, {"a": 1, "b": "x", "label": "y"}, {"a": "x", "b": 1, "label": "y"}]
    labeled = [FORMS["labeled texts"].read(SourceRow("row", row)) for row in rows]
    assert [(row.text, row.label) for row in labeled] == [("x", "y")] * 3
    flags = [{"text": "x", "c": 1, "d": 0}, {"text": "x", "c": 0, "d": 1}, {"text": "x", "c": 2, "d": 1}]
    assert [FORMS["labeled texts"].read(SourceRow("row", row)).label for row in flags[:2]] == [["c"], ["d"]]
    with pytest.raises(BadRowError, match="no column label"):
        FORMS["labeled texts"].read(SourceRow("row", flags[2]))


@pytest.mark.parametrize(
    ("suffix", "kind", "most"),
    [("csv", "labeled texts", 150), ("tsv", "labeled texts", 150), ("jsonl", "labeled texts", 150),
     ("chat.jsonl", "conversations", 450)],
)  # fmt: skip
def test_a_row_is_read_with_few_function_calls(suffix: str, kind: str, most: int, tmp_path: Path) -> None:
    """The work that is the same for all rows of a file is done once. Calls are counted, because times vary."""
    path = tmp_path / f"rows.{suffix}"
    rows = 400
    if suffix == "csv":
        path.write_text("text,label\n" + '"a, b",good\n' * rows)
    elif suffix == "tsv":
        path.write_text("text\tlabel\n" + "a b\tgood\n" * rows)
    else:
        row = {"messages": [ASKED, GIVEN] * 2} if kind == "conversations" else {"text": "a b", "label": "good"}
        path.write_text(f"{json.dumps(row)}\n" * rows)
    read = read_rows(path, configured=USUAL.format)
    report = RowReport("fail")
    FORMS[kind].read_all(islice(read, 100), report)  # recognizes the file
    profile = cProfile.Profile()
    with profile:
        assert len(FORMS[kind].read_all(read, report)) == 300
    assert sum(entry.callcount for entry in profile.getstats()) / 300 < most


CHATS: list[dict[str, Any]] = [
    {"messages": [ASKED, GIVEN]},
    {"prompt": "a?", "completion": "b"},
    {"prompt": [ASKED], "completion": [GIVEN]},
    {"instruction": "a?", "output": "b"},
    {"conversations": [HUMAN, GPT]},
]


@pytest.mark.parametrize("row", CHATS, ids=range(len(CHATS)))
def test_a_system_message_in_a_column_of_its_own_is_learned(row: dict[str, Any]) -> None:
    without, found = read("conversations", row)[0], read("conversations", {**row, "system": "Be brief."})[0]
    assert (without.turns, found.turns) == ((ASKED, GIVEN), (SYSTEM, ASKED, GIVEN))
    assert found.first == without.first + bool(without.first)
    if without.plain is not None:  # for models without a chat template
        assert found.plain == (f"Be brief.\n\n{without.plain[0]}", "b")
    assert read("conversations", {**row, "system": None}) == read("conversations", {**row, "system": ""}) == [without]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a?", "chosen": "b", "rejected": "c"},
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "c"}},
        {"chosen": [ASKED, GIVEN], "rejected": [ASKED, {"role": "assistant", "content": "c"}]},
        {"messages": [ASKED, GIVEN], "label": True},
        {"prompt": "a?", "completion": "b", "label": True},
    ],
    ids=range(5),
)
def test_preferences_have_the_same_system_message(row: dict[str, Any]) -> None:
    (found,) = read("preferences", {**row, "system": "Be brief."})
    answers = [GIVEN, {"role": "assistant", "content": "c"}][: len(found.conversations)]
    assert [one.turns for one in found.conversations] == [(SYSTEM, ASKED, answer) for answer in answers]


def test_prompts_have_the_same_system_message() -> None:
    for row in ({"messages": [ASKED]}, {"prompt": "a?"}, {"prompt": [ASKED]}, {"conversations": [HUMAN]}):
        (found,) = read("prompts", {**row, "system": "Be brief."})
        assert found.turns == (SYSTEM, ASKED)
        assert found.text in ("", "Be brief.\n\na?")


def test_a_system_message_is_not_repeated() -> None:
    turns = [SYSTEM, ASKED, GIVEN]
    row = SourceRow("rows.jsonl, line 1", {"messages": turns, "system": "Be brief."})
    assert CONVERSATIONS.read(row).turns == tuple(turns)
    other = CONVERSATIONS.read(row._replace(value={**row.value, "system": "Be long."}))
    assert other.turns == ({"role": "system", "content": "Be long."}, *turns)
    with pytest.raises(BadRowError, match="has a value of type int instead of a string as the content of turn 1"):
        PREFERENCES.read(row._replace(value={"messages": turns[1:], "label": True, "system": 1}))


def test_a_completed_prompt_is_read_as_a_conversation() -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [ASKED], "prompt": None, "text": None},  # as in Parquet files with several forms
        {"messages": None, "prompt": "a?"},
        {"messages": None, "prompt": None, "text": "a?"},
        {"conversations": [HUMAN], "system": "Be brief."},
    ]
    completed = [PROMPTS.read(SourceRow("line 1", row)).completed("b", "stop") for row in rows]
    found = [CONVERSATIONS.read(SourceRow("line 1", row)) for row in completed]
    assert [one.turns or one.text for one in found] == [
        (ASKED, GIVEN), (ASKED, GIVEN), "a?b", (SYSTEM, ASKED, GIVEN),
    ]  # fmt: skip


def test_columns_may_be_in_objects() -> None:
    row = {"id": 1, "review": {"body": "a", "by": {"name": "Ada"}, "stars": "x"}, "a.b": "c"}
    columns = Columns(text="review.body", label="review.stars")
    report = RowReport("fail")
    labeled = FORMS["labeled texts"].read(SourceRow("row", row), columns, report)
    assert (labeled.text, labeled.label) == ("a", "x")
    assert {*report.unused} == {"id", "review.by", "a.b"}
    deeper = Columns(text="review.by.name")
    assert FORMS["texts"].read(SourceRow("row", row), deeper) == "Ada"
    assert FORMS["labeled texts"].read(SourceRow("row", {**row, "label": "y"}), deeper).text == "Ada"
    assert FORMS["texts"].read(SourceRow("row", row), Columns(text="a.b")) == "c"
    assert unlabeled_text(SourceRow("row", row), columns).text == "a"
    with pytest.raises(BadRowError, match=r"no column review\.title, only .*review\.body"):
        FORMS["texts"].read(SourceRow("row", row), Columns(text="review.title"))

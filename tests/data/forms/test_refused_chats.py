"""Chats that cannot be learned are refused with a reason, and what looks like a chat but is none stays a text."""

import json
from pathlib import Path
from typing import Any

import pytest

from sansgpu.data.files import read_rows
from sansgpu.data.forms.chats import CONVERSATIONS, PROMPTS, Conversation
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.tables import Columns
from sansgpu.jobs.data import guess_tasks
from tests.data.forms.chat_rows import ASKED, GIVEN, SYSTEM, TOOL, TURNS, WHERE, calling, read

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"messages": [*TURNS], "images": ["a.png"]}, "has images, but only text is read"),
    "a mark": ({"messages": [{"role": "user", "content": "<image>\na?"}, GIVEN]}, "has the mark <image> in turn 1"),
    "a mark at the end": ({"prompt": "a? <video>", "completion": "b"}, "has the mark <video> in turn 1"),
    "an image in a turn": ({"messages": [{**ASKED, "images": ["a.png"]}, GIVEN]}, "has images in turn 1"),
    "a part": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, GIVEN]},
               "has a part of type image_url in turn 1"),
    "a share": ({"messages": [ASKED, {**GIVEN, "weight": 0.5}]}, "has the weight 0.5 in turn 2 instead of 0 or 1"),
    "a list as flag": ({"messages": [ASKED, {**GIVEN, "mask": [1]}]}, r"has the mask \[1\] in turn 2"),
    "no tools": ({"messages": [*TURNS], "tools": "hammer"}, 'has "hammer" in its tools instead of a JSON schema'),
    "no call": (calling({"tool_calls": ["x"]}), "has the tool call .x. in turn 2"),
    "no name": (calling({"tool_calls": [{"function": {"arguments": {}}}]}), "has a tool call without a name in turn 2"),
    "broken arguments": (calling({"tool_calls": [{"name": "look", "arguments": '{"at": '}]}), "not valid JSON"),
    "a call that is none": ({"conversations": [["user", "a?"], ["function_call", "look!"]]}, "has the tool call"),
    "no answers": ({"query": "a?", "tools": [TOOL], "answers": "[]"}, "has no answers"),
    "lists of two lengths": ({"messages": {"role": ["user"], "content": ["a?", "b"]}}, "has an object in messages"),
    "one text": ({"messages": ["x"]}, "has a text as turn 1"),
    "a role": ({"conversations": [["user", "a?"], ["narrator", "b"]]}, "unknown role .narrator. in turn 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learned_is_refused(name: str) -> None:
    row, problem = REFUSED[name]
    with pytest.raises(BadRowError, match=rf"^{WHERE} .*({problem}).*; fix or remove the row\.$"):
        read(row)


def test_a_text_of_chatml_turns_is_a_conversation_if_the_model_has_a_template() -> None:
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    found = read({"text": text})
    assert (found.turns, found.text) == ((SYSTEM, ASKED, GIVEN), text)
    assert found.for_template(True).text is None
    assert found.for_template(False).turns == ()
    for other in (
        text + "more",
        "see " + text,
        text.replace("user", "nobody"),
        text[: text.index("<|im_start|>assistant")],
    ):
        assert read({"text": other}) == Conversation(WHERE, text=other)


def test_a_prompt_may_be_turns_as_text() -> None:
    prompt = PROMPTS.read(SourceRow(WHERE, {"prompt": str([ASKED]), "answer": "b"}))
    assert (prompt.turns, prompt.text) == ((ASKED,), "")


def test_what_a_form_does_not_read_is_named() -> None:
    for row, unused in (
        ({"text": "a", "system": "b", "tools": [TOOL]}, {"system", "tools"}),
        ({"instruction": "a?", "input": "x", "context": "y", "output": "b"}, {"context"}),
        (
            {"messages": [*TURNS], "system": "a", "system_prompt": "b", "history": [[]]},
            {"system_prompt", "history"},
        ),
        ({"prompt": "a?", "completion": "b", "input": "c", "text": "d", "topic": "e"}, {"input", "text", "topic"}),
        (
            {"messages": [{**ASKED, "content": [{"type": "text", "text": "a?", "cache_control": 1}]}, GIVEN]},
            {"cache_control of a part"},
        ),
        ({"query": "a?", "tools": [TOOL], "answers": [{"name": "look"}], "context": "c"}, {"context"}),
    ):
        report = RowReport("fail")
        CONVERSATIONS.read(SourceRow(WHERE, row), report=report)
        assert {*report.unused} == unused


def test_a_text_that_looks_like_json_stays_a_text() -> None:
    question = '["What", "is"] this?'
    assert read({"prompt": question, "completion": '{"role": "user"}'}).turns[0]["content"] == question
    assert read({"data": ['"a"', "[1]"]}).turns == (
        {"role": "user", "content": '"a"'},
        {"role": "assistant", "content": "[1]"},
    )


def test_several_answers_to_one_prompt_are_refused() -> None:
    for forms, row, problem in (
        (CONVERSATIONS, {"prompt": "a?", "completion": ["b", "c"]}, "completion holds 2 answers; write one row for"),
        (CONVERSATIONS, {"question": "a?", "answer": ["b", "c", "d"]}, "answer holds 3 answers"),
        (CONVERSATIONS, {"instruction": "a?", "output": ["b", "c"]}, "output holds 2 answers"),
        (CONVERSATIONS, {"prompt": ["a?", "b", "c?"], "completion": "d"}, "prompt holds 3 prompts"),
        (PREFERENCES, {"prompt": "a?", "chosen": "b", "rejected": ["c", "d"]}, "rejected holds 2 answers"),
        (PREFERENCES, {"prompt": ["a?", "b?"], "chosen": "c", "rejected": "d"}, "prompt holds 2 prompts"),
        (PREFERENCES, {"prompt": ["a?", "b?"], "completion": "c", "label": True}, "prompt holds 2 prompts"),
        (PROMPTS, {"prompt": ["a?", "b?"]}, "prompt holds 2 prompts"),
    ):
        with pytest.raises(BadRowError, match=f"^{WHERE}: {problem}"):
            forms.read(SourceRow(WHERE, row))


def test_a_list_with_one_text_is_that_text() -> None:
    for row in ({"prompt": ["a?"], "completion": ["b"]}, {"instruction": "a?", "output": ["b"]}):
        found = read(row)
        assert (found.turns, found.plain is not None) == (TURNS, True)
    pair = PREFERENCES.read(SourceRow(WHERE, {"prompt": "a?", "chosen": ["b"], "rejected": ["c"]}))
    assert [one.turns[-1]["content"] for one in pair.conversations] == ["b", "c"]
    assert PROMPTS.read(SourceRow(WHERE, {"prompt": ["a?"]})).text == "a?"


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("missing", [NAN, INFINITY])
def test_nan_is_a_missing_value(missing: float) -> None:
    for row in (
        {"instruction": "a?", "input": missing, "output": "b", "system": missing, "history": missing},
        {"prompt": missing, "completion": missing, "messages": [*TURNS], "images": missing, "tools": missing},
        {"instruction": missing, "input": "a?", "output": "b"},
    ):
        report = RowReport("fail")
        assert CONVERSATIONS.read(SourceRow(WHERE, row), report=report).turns == TURNS
        assert not report.unused
    for key, row in (
        ("output", {"instruction": "a?"}),
        ("answer", {"question": "a?"}),
        ("completion", {"prompt": "a?"}),
    ):
        with pytest.raises(BadRowError, match=f"it has {next(iter(row))}, but needs"):
            read({**row, key: missing})
    with pytest.raises(BadRowError, match="it has prompt, chosen, but needs"):
        PREFERENCES.read(SourceRow(WHERE, {"prompt": "a?", "chosen": "b", "rejected": missing}))
    rated = {"prompt": "a?", "completion": "b", "label": missing, "kto_tag": True}
    assert PREFERENCES.read(SourceRow(WHERE, rated)).label is True


@pytest.mark.parametrize("empty", [[], "", None])
def test_empty_turns_beside_other_columns_are_missing(empty: Any) -> None:
    for row in ({"conversations": [*TURNS]}, {"prompt": "a?", "completion": "b"}, {"data": [["a?", "b"]]}):
        assert read({"messages": empty, **row}).turns == TURNS
    assert read({"messages": empty, "conversations": empty, "text": "a"}).text == "a"
    assert PROMPTS.read(SourceRow(WHERE, {"messages": empty, "text": "a"})).text == "a"
    rated = {"messages": empty, "conversations": [*TURNS], "label": True}
    assert PREFERENCES.read(SourceRow(WHERE, rated)).conversations[0].turns == TURNS


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_question_is_a_bad_row(empty: str) -> None:
    for row, column in (
        ({"prompt": " ", "completion": "b"}, "prompt"),
        ({"prompt": [], "completion": "b"}, "prompt"),
        ({"input": empty, "output": "b"}, "input"),
        ({"instruction": empty, "input": empty, "output": "b"}, "instruction"),
        ({"question": empty, "context": None, "answer": "b"}, "question"),
        ({"prompt": [" "], "response": "b", "history": [["a?", "b"]]}, "prompt"),
    ):
        with pytest.raises(BadRowError, match=f"has an empty {column}; fix"):
            read(row)


@pytest.mark.parametrize("asked", ["problem", "question"])
def test_the_solution_is_learned_instead_of_its_last_number(asked: str) -> None:
    report = RowReport("fail")
    row = {"answer": "4", asked: "2 + 2?", "solution": "Adding gives 4."}
    assert CONVERSATIONS.read(SourceRow(WHERE, row), report=report).turns[1]["content"] == "Adding gives 4."
    assert report.unused == {"answer": 1}


@pytest.mark.parametrize("column", ["image", "image_url", "img", "images", "video"])
def test_a_column_of_images_is_refused(column: str) -> None:
    for forms, row in (
        (CONVERSATIONS, {"messages": [*TURNS]}),
        (CONVERSATIONS, {"prompt": "a?", "completion": "b"}),
        (PREFERENCES, {"prompt": "a?", "chosen": "b", "rejected": "c"}),
    ):
        for value in ("a.png", {"bytes": "x"}, ["a.png"]):
            with pytest.raises(BadRowError, match=f"has {column}, but only text is read"):
                forms.read(SourceRow(WHERE, {**row, column: value}))
        assert forms.read(SourceRow(WHERE, {**row, column: None}))
    with pytest.raises(BadRowError, match=f"has {column} in turn 1"):
        read({"messages": [{**ASKED, column: "a.png"}, GIVEN]})


def test_the_task_of_rows_that_are_lists_of_turns_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(TURNS)}\n" * 3)
    assert guess_tasks(str(file))[0].task == "sft"


@pytest.mark.parametrize("prompt", ["p", [{"role": "user", "content": "p"}], [SYSTEM, ASKED], ["p"]])
def test_a_prompt_that_the_turns_lack_is_refused(prompt: Any) -> None:
    answers = {"chosen": [*TURNS], "rejected": [ASKED, {"role": "assistant", "content": "c"}]}
    with pytest.raises(BadRowError, match="has a prompt that is not in the turns of chosen"):
        PREFERENCES.read(SourceRow(WHERE, {"prompt": prompt, **answers}))


@pytest.mark.parametrize("prompt", [" a?", [ASKED], ASKED, str([ASKED]), "Human: a? Assistant:", "", None, []])
def test_a_prompt_that_the_turns_have_is_fine(prompt: Any) -> None:
    answers = {"chosen": [*TURNS], "rejected": [ASKED, {"role": "assistant", "content": "c"}]}
    found = PREFERENCES.read(SourceRow(WHERE, {"prompt": prompt, **answers})).conversations
    assert [one.turns[-1]["content"] for one in found] == ["b", "c"]


@pytest.mark.parametrize("word", ["None", "NA", "N/A", "n/a", "null", "NaN"])
def test_words_for_no_value_in_tables_are_not_learned(word: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    lines = "instruction,input,output", f"a?,{word},b", "a?,x,c", f"d?,,{word}", f"e?,y,{word}", "g?,z,b", "i?,w,c"
    file.write_text("\n".join(lines))
    first, _, missing, *_ = read_rows(file, configured=Columns().format)
    assert CONVERSATIONS.read(first).turns == TURNS
    with pytest.raises(BadRowError, match="it has instruction, input, but needs"):
        CONVERSATIONS.read(missing)

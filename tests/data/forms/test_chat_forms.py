"""Chats are read in the forms in which people bring them: nothing of a row is lost without a word."""

import json
from pathlib import Path
from typing import Any

import pytest

from sansgpu.data.files import read_rows
from sansgpu.data.forms.chats import CONVERSATIONS, PROMPTS, ConversationOptions
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.tables import Columns
from tests.data.forms.chat_rows import ASKED, GIVEN, SYSTEM, TOOL, TURNS, WHERE, calling, read
from tests.processes import write_rows

SAME_TURNS: dict[str, Any] = {
    "names of keys": {"messages": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
    "names of roles": {"messages": [{"role": "User", "content": "a?"}, {"role": "model", "content": "b"}]},
    "bot": {"conversations": [{"from": "prompter", "value": "a?"}, {"from": "chatgpt", "value": "b"}]},
    "speakers": {"dialogue": [{"speaker": "user", "text": "a?"}, {"speaker": "bot", "text": "b"}]},
    "parts": {"messages": [{"role": "user", "parts": [{"text": "a?"}]}, {"role": "model", "parts": ["b"]}]},
    "types of parts": {"messages": [
        {"role": "user", "content": [{"type": "input_text", "text": "a?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "image_url": None}]}]},
    "JSON text": {"messages": json.dumps(TURNS)},
    "JSON texts": {"messages": [json.dumps(turn) for turn in TURNS]},
    "Python text": {"messages": str([*TURNS])},
    "lists of keys": {"messages": {"role": ["user", "assistant"], "content": ["a?", "b"]}},
    "turns as text": {"prompt": str([ASKED]), "completion": json.dumps(GIVEN)},
    "keys of roles": {"messages": [{"user": "a?"}, {"assistant": "b"}]},
    "capitals": {"Messages": [{"Role": "User", "Content": "a?"}, {"ROLE": "assistant", "CONTENT": "b"}]},
    "an export of Claude": {"chat_messages": [
        {"sender": "human", "content": "a?"}, {"sender": "assistant", "content": [{"type": "text", "text": "b"}]}]},
    "both in one": {"conversations": [{"human": "a?", "assistant": "b"}]},
    "the answer first": {"conversation": [{"output": "b", "input": "a?"}]},
    "pairs": {"conversations": [["a?", "b"]]},
    "pairs with roles": {"conversations": [["user", "a?"], ["assistant", "b"]]},
    "texts": {"data": ["a?", "b"]},
    "a list": [*TURNS],
    "ChatML": {"messages": "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"},
    "prompt and response": {"prompt": "a?", "response": "b"},
    "question and answer": {"question": "a?", "answer": "b"},
    "query and response": {"query": "a?", "response": "b"},
    "input and output": {"input": "a?", "output": "b"},
    "inputs and targets": {"inputs": "a?", "targets": "b"},
    "problem and solution": {"problem": "a?", "solution": "b"},
    "no instruction": {"instruction": "", "input": "a?", "output": "b"},
    "no input": {"instruction": "a?", "input": None, "output": "b", "history": []},
}  # fmt: skip


@pytest.mark.parametrize("row", SAME_TURNS.values(), ids=SAME_TURNS)
def test_the_same_turns_are_read(row: Any) -> None:
    assert read(row).turns == TURNS


# Rows in the form of public data sets, with the turns and what is not used of them.
PUBLIC: dict[str, tuple[dict[str, Any], list[tuple[str, str]], set[str]]] = {
    "Dolly": ({"instruction": "When did it open?", "context": "It opened in 1990.", "response": "1990",
               "category": "closed_qa"},
              [("user", "When did it open?\n\nIt opened in 1990."), ("assistant", "1990")], {"category"}),
    "Dolly without context": ({"instruction": "a?", "context": "", "response": "b", "category": "open_qa"},
                              [("user", "a?"), ("assistant", "b")], {"category"}),
    "OpenHermes": ({"system_prompt": None, "source": "x", "idx": None, "conversations": [
        {"from": "system", "value": "Be brief.", "weight": None}, {"from": "human", "value": "a?", "weight": None},
        {"from": "gpt", "value": "b", "weight": None}]},
        [("system", "Be brief."), ("user", "a?"), ("assistant", "b")], {"source"}),
    "OpenOrca": ({"id": "1", "system_prompt": "Be brief.", "question": "a?", "response": "b"},
                 [("system", "Be brief."), ("user", "a?"), ("assistant", "b")], {"id"}),
    "UltraChat": ({"id": "0", "data": ["a?", "b", "c?", "d"]},
                  [("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")], {"id"}),
    "UltraChat 200k": ({"prompt": "a?", "prompt_id": "1", "messages": [*TURNS]},
                       [("user", "a?"), ("assistant", "b")], {"prompt", "prompt_id"}),
    "Capybara": ({"source": "x", "conversation": [{"input": "a?", "output": "b"}, {"input": "c?", "output": "d"}]},
                 [("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")], {"source"}),
    "GSM8K": ({"question": "2 + 3?", "answer": "It is 5.\n#### 5"},
              [("user", "2 + 3?"), ("assistant", "It is 5.\n#### 5")], set()),
    "xLAM": ({"id": 1, "query": "a?", "answers": '[{"name": "look", "arguments": {"at": "x"}}]',
              "tools": '[{"name": "look", "parameters": {"at": {"type": "str"}}}]'},
             [("user", "a?"), ("assistant", "")], {"id"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_rows_of_public_data_sets_need_no_setting(name: str) -> None:
    row, turns, unused = PUBLIC[name]
    report = RowReport("fail")
    found = CONVERSATIONS.read(SourceRow(WHERE, row), report=report)
    assert [(turn["role"], turn["content"]) for turn in found.turns] == turns
    assert {*report.unused} == unused
    if name == "xLAM":
        assert found.turns[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "x"}}
        schema = {"type": "object", "properties": {"at": {"type": "str"}}}
        assert found.tools == ({"type": "function", "function": {"name": "look", "parameters": schema}},)


def test_ultrafeedback_is_read_in_task_preference() -> None:
    answers = {"chosen": [*TURNS], "rejected": [ASKED, {"role": "assistant", "content": "c"}]}
    row = {"prompt": "a?", "prompt_id": "1", "messages": [*TURNS], **answers}
    report = RowReport("fail")
    found = PREFERENCES.read(SourceRow(WHERE, row), report=report)
    assert [one.turns[-1]["content"] for one in found.conversations] == ["b", "c"]
    assert {*report.unused} == {"prompt_id", "messages"}
    in_csv = {key: json.dumps(value) for key, value in answers.items()}
    assert PREFERENCES.read(SourceRow(WHERE, in_csv)).conversations == found.conversations


def test_the_best_and_the_worst_of_ultrafeedbacks_completions_are_compared() -> None:
    scores = (("d", 3.0), ("b", 4.5), ("c", None), ("e", 1.0))
    completions = [{"response": text, "overall_score": score, "model": "x"} for text, score in scores]
    row, report = {"source": "x", "instruction": "a?", "completions": completions}, RowReport("fail")
    found = PREFERENCES.read(SourceRow(WHERE, row), report=report)
    assert [one.turns[-1]["content"] for one in found.conversations] == ["b", "e"]
    others = "the completions between the best and the worst", "model of a completion"
    assert {*report.unused} == {"source", *others}
    with pytest.raises(BadRowError, match="has no two completions with different scores"):
        PREFERENCES.read(SourceRow(WHERE, {**row, "completions": completions[:1] * 2}))


def test_system_history_and_context_are_part_of_a_preference() -> None:
    row = {"instruction": "c?", "input": "It is.", "system": "Be brief.", "history": [["a?", "b"]],
           "chosen": "d", "rejected": "e"}  # fmt: skip
    prompt = SYSTEM, ASKED, GIVEN, {"role": "user", "content": "c?\n\nIt is."}
    found = PREFERENCES.read(SourceRow(WHERE, row)).conversations
    assert [(one.turns[:-1], one.learned_turns) for one in found] == [(prompt, [4])] * 2
    rated = {"instruction": "a?", "output": "b", "kto_tag": False, "system": "Be brief."}
    assert PREFERENCES.read(SourceRow(WHERE, rated)).rated[0][0].turns == (SYSTEM, ASKED, GIVEN)


def test_history_precedes_the_instruction_and_is_learned() -> None:
    found = read({"instruction": "c?", "output": "d", "history": [["a?", "b"]], "system": "Be brief."})
    assert [turn["content"] for turn in found.turns] == ["Be brief.", "a?", "b", "c?", "d"]
    assert found.learned_turns == [2, 4]
    assert found.plain is None  # no text without a chat template would have the history
    (prompt,) = (PROMPTS.read(SourceRow(WHERE, {"prompt": "c?", "history": [["a?", "b"]]})),)
    assert [turn["content"] for turn in prompt.turns] == ["a?", "b", "c?"]


CALL = {"function": {"name": "look", "arguments": {"at": "x"}}}
CALLS: dict[str, Any] = {
    "as they are": {"tool_calls": [CALL]},
    "arguments as JSON text": {"tool_calls": [{"function": {"name": "look", "arguments": '{"at": "x"}'}}]},
    "encoded twice": {"tool_calls": [{"function": {"name": "look", "arguments": json.dumps('{"at": "x"}')}}]},
    "without function": {"tool_calls": [{"name": "look", "arguments": {"at": "x"}}]},
    "parameters": {"tool_calls": [{"name": "look", "parameters": {"at": "x"}}]},
    "calls as JSON text": {"tool_calls": json.dumps([CALL])},
    "a single call": {"tool_calls": CALL},
    "nulls of Parquet": {
        "tool_calls": [{"id": None, "function": {"name": "look", "arguments": {"at": "x", "y": None}}}]
    },
    "older": {"function_call": {"name": "look", "arguments": '{"at": "x"}'}, "tool_calls": None},
    "older, as JSON text": {"function_call": '{"name": "look", "arguments": "{\\"at\\": \\"x\\"}"}'},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_of_tools_have_arguments_that_are_objects(call: dict[str, Any]) -> None:
    (found,) = read(calling(call)).turns[1]["tool_calls"]
    assert found["function"] == CALL["function"]
    assert "function_call" not in read(calling(call)).turns[1]


def test_calls_and_results_may_be_turns_of_their_own() -> None:
    turns = [("human", "a?"), ("function_call", '{"name": "look", "arguments": {"at": "x"}}'), ("observation", "y"),
             ("gpt", "b")]  # fmt: skip
    found = read({"conversations": [{"from": role, "value": value} for role, value in turns]})
    assert [turn["role"] for turn in found.turns] == ["user", "assistant", "tool", "assistant"]
    assert found.turns[1]["tool_calls"] == [{"type": "function", **CALL}]
    older = {"role": "function", "name": "look", "content": {"at": ["x"], "y": None}}
    assert read({"messages": [ASKED, older, GIVEN]}).turns[1] == {
        "role": "tool", "name": "look", "content": '{"at": ["x"]}',
    }  # fmt: skip
    for content, text in (([1, 2], "[1, 2]"), (14, "14"), ([{"type": "text", "text": "é"}], "é"), ([], "[]")):
        assert read({"messages": [ASKED, {"role": "tool", "content": content}, GIVEN]}).turns[1]["content"] == text


@pytest.mark.parametrize(
    ("tools", "column"),
    [
        ([TOOL], "tools"),
        (json.dumps([TOOL]), "tools"),
        ([json.dumps(TOOL)], "tools"),
        (TOOL, "tools"),
        ([TOOL["function"]], "functions"),
        (str([TOOL]), "tools"),
    ],
)
def test_tools_are_read_in_every_task(tools: Any, column: str) -> None:
    rows: list[tuple[Any, dict[str, Any]]] = [
        (CONVERSATIONS, {"messages": [*TURNS]}),
        (CONVERSATIONS, {"instruction": "a?", "output": "b"}),
        (PROMPTS, {"messages": [ASKED]}),
        (PREFERENCES, {"prompt": "a?", "chosen": "b", "rejected": "c"}),
    ]
    for forms, row in rows:
        report = RowReport("fail")
        found = forms.read(SourceRow(WHERE, {**row, column: tools}), report=report)
        assert getattr(found, "tools", None) == (TOOL,) or found.conversations[1].tools == (TOOL,)
        assert not report.unused


def test_other_names_of_columns_are_set() -> None:
    columns = Columns(system="rules", tools="api")
    found = read({"messages": [*TURNS], "rules": "Be brief.", "api": [TOOL], "system": "Be long."}, columns)
    assert (found.turns, found.tools) == ((SYSTEM, *TURNS), (TOOL,))
    with pytest.raises(BadRowError, match=r"has no column rules, only messages, api; set data\.system_column"):
        read({"messages": [*TURNS], "api": []}, columns)


def test_parquet_gives_the_same_conversations(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = [
        calling({"tool_calls": [CALL]}, tools=[TOOL]),
        calling({"tool_calls": [{"function": {"name": "go", "arguments": {"to": 3}}}], "name": "me"}),
        {"messages": [ASKED, {"role": "tool", "content": "x", "tool_call_id": "1"}, {**GIVEN, "weight": 1}]},
        {"messages": [ASKED, {**GIVEN, "weight": 0}, ASKED, GIVEN], "system": "Be brief."},
    ]
    lines, file = write_rows(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"
    names = {name: None for row in rows for name in row}
    parquet.write_table(pa.Table.from_pylist([{**names, **row} for row in rows]), file)
    found = [[CONVERSATIONS.read(row._replace(where=WHERE)) for row in read_rows(path)] for path in (lines, file)]
    assert found[0] == found[1]
    assert found[0][3].unlearned == {2}


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"train": False}, {"trainable": "false"}, {"loss": 0.0}, {"mask": True}]
)
def test_answers_that_are_not_to_be_learned_are_known(flag: dict[str, Any]) -> None:
    wrong, others = {**GIVEN, **flag}, {key: not value for key, value in flag.items() if value != "false"}
    found = read({"messages": [ASKED, wrong, ASKED, {**GIVEN, **others}]})
    assert (found.turns, found.learned_turns) == ((*TURNS, *TURNS), [3])
    later = read({"messages": [SYSTEM, ASKED, GIVEN, ASKED, wrong, ASKED, GIVEN]}).from_question(3)
    assert (later.turns, later.learned_turns) == ((SYSTEM, *TURNS, *TURNS), [4])
    with pytest.raises(BadRowError, match="no assistant turn to learn"):
        read({"messages": [ASKED, wrong]})


def test_only_the_last_answer_is_learned_on_request() -> None:
    options = ConversationOptions(last_answer_only=True)
    assert options.applied(read({"messages": [*TURNS, *TURNS]})).learned_turns == [3]
    with pytest.raises(BadRowError, match="no assistant turn to learn"):
        options.applied(read({"messages": [*TURNS, ASKED, {**GIVEN, "weight": 0}]}))


def texts(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("turns", "merged", "learned"),
    [
        ([("user", "a"), ("user", "b"), ("assistant", "c")], [("user", "a\n\nb"), ("assistant", "c")], [1]),
        ([("assistant", "hi"), ("user", "b"), ("assistant", "c")], [("user", "hi\n\nb"), ("assistant", "c")], [1]),
        (
            [("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"), ("assistant", "e")],
            [("user", "a"), ("assistant", "b"), ("user", "c\n\nd"), ("assistant", "e")],
            [1, 3],
        ),
        (
            [("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("assistant", "e")],
            [("system", "a\n\nb"), ("user", "c"), ("assistant", "d\n\ne")],
            [2],
        ),
        (
            [("user", "a"), ("assistant", "b"), ("tool", "c"), ("tool", "d"), ("assistant", "e")],
            [("user", "a"), ("assistant", "b"), ("tool", "c"), ("tool", "d"), ("assistant", "e")],
            [1, 4],
        ),
    ],
)
def test_turns_are_merged_on_request(
    turns: list[tuple[str, str]], merged: list[tuple[str, str]], learned: list[int]
) -> None:
    found = read({"messages": texts(*turns)})
    assert found.turns == tuple(texts(*turns))
    after = ConversationOptions(merge_turns=True).applied(found)
    assert (after.turns, after.learned_turns) == (tuple(texts(*merged)), learned)


def test_a_prompt_is_not_merged_with_its_answer() -> None:
    row = {"prompt": [ASKED, GIVEN], "completion": [GIVEN]}
    found = ConversationOptions(merge_turns=True).applied(read(row))
    assert (found.turns, found.learned_turns) == ((ASKED, GIVEN, GIVEN), [2])
    unlearned = read({"messages": [ASKED, {**GIVEN, "weight": 0}, GIVEN, *TURNS]})
    assert ConversationOptions(merge_turns=True).applied(unlearned).learned_turns == [3]


CHATML_QUESTION = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
CHATML: dict[str, str] = {
    "no last mark": CHATML_QUESTION + "b",
    "no last mark, but a line end": CHATML_QUESTION + "b\n",
    "no marks": "<|im_start|>user\na?\n<|im_start|>assistant\nb",
    "an end of the text instead": CHATML_QUESTION + "b</s>",
    "lines of Windows": (CHATML_QUESTION + "b<|im_end|>\n").replace("\n", "\r\n"),
    "lines of Windows, no last mark": (CHATML_QUESTION + "b\n").replace("\n", "\r\n"),
    "spaces around": f" \n{CHATML_QUESTION}b<|im_end|> \n ",
    "spaces at roles": (CHATML_QUESTION + "b<|im_end|>").replace("user", " user "),
    "a begin of a further answer": f"{CHATML_QUESTION}b<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("text", CHATML.values(), ids=CHATML)
def test_chatml_with_small_faults_is_read_as_turns(text: str) -> None:
    assert read({"text": text}).turns == TURNS
    assert read({"messages": text}).turns == TURNS
    pair = {"chosen": text, "rejected": f"{CHATML_QUESTION}c<|im_end|>"}
    for row in (pair, {"prompt": "a?", **pair}):
        found = PREFERENCES.read(SourceRow(WHERE, row)).conversations
        assert [(one.turns[:-1], one.turns[-1]["content"]) for one in found] == [((ASKED,), "b"), ((ASKED,), "c")]


def test_chatml_answers_follow_their_prompt() -> None:
    answers = {name: f"<|im_start|>assistant\n{name}<|im_end|>\n" for name in ("chosen", "rejected")}
    found = PREFERENCES.read(SourceRow(WHERE, {"prompt": "a?", **answers})).conversations
    assert [[turn["content"] for turn in one.turns] for one in found] == [["a?", "chosen"], ["a?", "rejected"]]


def test_a_chat_of_glaive_has_turns_calls_and_tools() -> None:
    functions = [{"name": "rate", "parameters": {"type": "object", "properties": {}}}, {"name": "other"}]
    listed = "\n".join(json.dumps(one, indent=4) for one in functions)
    chat = (
        "USER: How much?\n\n\nASSISTANT: Sure. <functioncall> "
        """{"name": "rate", "arguments": '{"base": "it's"}'} <|endoftext|>\n\n\n"""
        'FUNCTION RESPONSE: {"rate": 0.9}\n\n\nASSISTANT: 4.5 <|endoftext|>\n\n\n'
    )
    found = read({"system": f"SYSTEM: You have functions. Use them if required -\n{listed}\n", "chat": chat})
    call = {"type": "function", "function": {"name": "rate", "arguments": {"base": "it's"}}}
    assert found.turns == (
        {"role": "system", "content": "You have functions. Use them if required"},
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": "Sure.", "tool_calls": [call]},
        {"role": "tool", "content": '{"rate": 0.9}'},
        {"role": "assistant", "content": "4.5"},
    )
    assert [tool["function"]["name"] for tool in found.tools] == ["rate", "other"]
    assert found.learned_turns == [2, 4]
    plain = read({"system": "SYSTEM: No functions.\n", "chat": "USER: a?\n\nASSISTANT: b <|endoftext|>"})
    assert [turn["content"] for turn in plain.turns] == ["No functions.", "a?", "b"]
    with pytest.raises(BadRowError, match=r"line 3 has a call in turn 2 that is not valid JSON: \{"):
        read({"chat": "USER: a?\n\nASSISTANT: <functioncall> {"})
    with pytest.raises(BadRowError, match="has functions in its system message that are not valid JSON"):
        read({"system": "SYSTEM: x -\n{", "chat": chat})


def _node(parent: str | None, role: str, text: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    content = {"content_type": kind, "parts": [text]}
    return {"parent": parent, "message": {"author": {"role": role}, "content": content, **more}}


def test_an_export_of_chatgpt_has_the_branch_of_its_current_message() -> None:
    mapping = {
        "root": {"parent": None, "message": None, "children": ["hidden"]},
        "hidden": _node("root", "user", "About me", metadata={"is_visually_hidden_from_conversation": True}),
        "asked": _node("hidden", "user", "a?"),
        "first": _node("asked", "assistant", "an answer that was generated again"),
        "call": _node("asked", "assistant", "search()", recipient="browser"),
        "found": _node("call", "tool", "a page"),
        "thought": _node("found", "assistant", "so b", kind="thoughts"),
        "second": _node("thought", "assistant", "b"),
        "more": _node("second", "assistant", "and c"),
        "last": _node("asked", "assistant", "never shown"),
    }
    row = {"title": "A chat", "mapping": mapping, "current_node": "more"}
    found = CONVERSATIONS.read(SourceRow("chats.json, row 1", row))
    turns = [(turn["role"], turn["content"]) for turn in found.turns]
    assert turns == [("user", "a?"), ("assistant", "b\n\nand c")]
    mapping["asked"]["message"]["content"]["content_type"] = "multimodal_text"
    with pytest.raises(BadRowError, match="has a message with an image or sound, but only text is read"):
        CONVERSATIONS.read(SourceRow("chats.json, row 1", row))

"""Lists and objects that are written as text in a cell: JSON, and the notations of Python, NumPy and pandas."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from sansgpu.data.forms.cells import MAX_PYTHON_VALUES, parsed_cell
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.rows import SourceRow

TURNS = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (' [1, "a", null] ', [1, "a", None]),
        ("{'a': None, 'b': True}", {"a": None, "b": True}),
        (json.dumps(json.dumps({"a": [1]})), {"a": [1]}),  # JSON in JSON
        (json.dumps(str({"a": [1]})), {"a": [1]}),  # Python's notation in JSON
        ("['a' 'b']", ["a", "b"]),  # NumPy
        ("array(['a'], dtype=object)", ["a"]),
        ("{'a': array([1, 2]), 'b': np.int64(3)}", {"a": [1, 2], "b": 3}),
        ("[]", []),
    ],
)
def test_lists_and_objects_in_text_are_parsed(text: str, value: Any) -> None:
    assert parsed_cell(text) == value


@pytest.mark.parametrize(
    "text", ["", "a", "3", '"a"', "(1, 2)", "{1, 2}", "{}}", "[a]", "[" * 100_000 + "]" * 100_000, "[1], [2]", '"[a]"']
)
def test_other_texts_are_unchanged(text: str) -> None:
    assert parsed_cell(text) is text


def test_nulls_in_objects_are_kept() -> None:
    assert parsed_cell('{"a": null}') == {"a": None}


def test_long_json_is_parsed() -> None:
    value = [{"text": "a, b" * 1_000_000}]
    assert parsed_cell(json.dumps(value)) == value


def test_long_text_in_python_notation_is_parsed_if_it_has_few_values() -> None:
    value = {"it's": "a" * 2_000_000, "b": None}
    assert parsed_cell(str(value)) == value
    many = f"[{'None,' * (MAX_PYTHON_VALUES + 1)}]"
    is_unchanged = parsed_cell(many) is many
    assert is_unchanged


def test_escapes_unknown_to_python_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parsed_cell(r"['\d']") == [r"\d"]


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(TURNS),
        str(TURNS),
        json.dumps(json.dumps(TURNS)),
        json.dumps([{**turn, "name": None} for turn in TURNS]),
    ],
)
def test_chats_in_text_are_the_turns(written: str) -> None:
    assert FORMS["conversations"].read(SourceRow("row", {"messages": written})).turns == tuple(TURNS)


def test_null_arguments_of_calls_are_left_out() -> None:
    call = {"name": "f", "arguments": json.dumps({"a": 1, "b": None})}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}]
    for written in (turns, json.dumps(turns)):
        (read,) = FORMS["conversations"].read(SourceRow("row", {"messages": written})).turns[1]["tool_calls"]
        assert read["function"]["arguments"] == {"a": 1}
